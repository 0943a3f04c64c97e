"""A program for GPUs on a machine without: its tensors hold nothing, and what it compiles runs nothing.

On meta, or, where an architecture is asked for, on the GPU of `tpcompile.fusion.no_gpu`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from tpcompile.torch_api.data_parallel import on_empty_tensors
from tpcompile.torch_api.dispatch import TorchDispatchMode, device_constructors, tree_flatten
from tpcompile.torch_api.generated import chosen_backend, without_caches
from tpcompile.torch_api.no_gpu import empty_tensors

META = torch.device("meta")
_ON_GPU = ("cuda", "xpu")


class Machine:
    """Where the tensors of a rank are, and what its programs are compiled with."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.lowers = True
        """False on the ranks whose Dynamo graphs are compared alone."""
        self.device = torch.device("cuda", 0) if arch else META
        self.mesh_type = "cuda" if arch else "cpu"
        self.empty: AbstractContextManager[Any] = empty_tensors() if arch else nullcontext()

    @contextmanager
    def building(self) -> Iterator[None]:
        """What `build` makes within holds nothing."""
        with ExitStack() as stack:
            for mode in (MadeOn(self.device), EmptyOnGpu(self.empty)) if self.arch else (OnMeta(),):
                stack.enter_context(mode)
            yield

    @contextmanager
    def calling(self) -> Iterator[None]:
        """What a step makes within holds nothing; Dynamo knows this mode."""
        with self.empty if self.arch else nullcontext():
            yield

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """What is compiled within is traced, and lowered as far as this machine can while `lowers` is set."""
        backend = chosen_backend(lambda: self.lowers, generates=bool(self.arch))
        with without_caches(), traced_only(backend), on_empty_tensors(self.device):
            yield


class EmptyOnGpu(TorchDispatchMode):
    """Tensors on the GPU hold nothing; those on the CPU are real, such as the ranks of a mesh."""

    def __init__(self, empty: AbstractContextManager[Any]) -> None:
        super().__init__()
        self.empty = empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call among tensors that hold nothing where one is, or will be, on the GPU."""
        kwargs = kwargs or {}
        leaves = tree_flatten((args, kwargs))[0]
        devices = (leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", None) for leaf in leaves)
        if not any(getattr(device, "type", "") in _ON_GPU for device in devices):
            return func(*args, **kwargs)
        with self.empty:
            return func(*args, **_without_generator(kwargs))


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Nothing is drawn: a generator of the CPU stands for that of the GPU."""
    return {name: None if name == "generator" else value for name, value in kwargs.items()}


class _AnyGenerator(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1])


class Generator(torch.Generator, metaclass=_AnyGenerator):
    """Of any device: that of a GPU needs its driver, and nothing is drawn."""

    _device = torch.device("cpu")

    def __new__(cls, device: Any = "cpu") -> Any:
        """One of the CPU, which says that it is of this device."""
        made = super().__new__(cls, "cpu")
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that it was made for."""
        return self._device


class MadeOn(TorchFunctionMode):
    """What a program makes without a device is on this one; torch's own ranks and offsets stay on the CPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with a device where there is none."""
        kwargs = kwargs or {}
        if func in (torch.Tensor.pin_memory, torch.Tensor.record_stream):
            return args[0]
        if func in _MAKERS and kwargs.get("device") is None and not _is_distributed(sys._getframe(1)):
            kwargs["device"] = self.device
        return func(*args, **kwargs)


class OnMeta(MadeOn):
    """What a program makes on a GPU, or moves to one, is on meta as well.

    FakeTensorMode would let tensors say `cuda`, but `module.to("cuda")` asks the driver before any mode is asked.
    """

    def __init__(self) -> None:
        super().__init__(META)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with each device of a GPU replaced."""
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        args = tuple(map(_on_meta, args))
        kwargs = {name: _on_meta(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, _without_generator(kwargs))


_MAKERS = device_constructors()
"""Functions that take a device and make a tensor."""


def _is_distributed(frame: FrameType) -> bool:
    """True where the mode of a subclass, or torch.distributed, calls."""
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename == __file__:
        caller = caller.f_back
    return caller is not None and "/torch/distributed/" in caller.f_code.co_filename


def _on_meta(value: Any) -> Any:
    is_device = isinstance(value, torch.device) and value.type in _ON_GPU
    is_name = isinstance(value, str) and value.partition(":")[0] in _ON_GPU
    return META if is_device or is_name else value


@contextmanager
def traced_only(backend: Any) -> Iterator[None]:
    """Everything that is compiled within has this backend: Inductor would make code for a device that is not there."""
    real = torch.compile

    @functools.wraps(real)
    def compile_(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        for name in ("mode", "options"):  # of Inductor: other backends refuse them
            options.pop(name, None)
        return real(model, **{**options, "backend": backend})

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "compile", compile_))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        for name, stands in _STANDS_FOR.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stands))
        yield


class Stream:
    """A stream or an event of a GPU on which nothing runs: whatever it is asked for, it is done."""

    device = META

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        """Nothing runs on it."""
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        """All is done."""
        return True

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds between two events: none is meant."""
        return 1.0

    def record_event(self, event: Any = None) -> Any:
        """The event."""
        return event or Stream()

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Done."""

    wait_stream = wait_event = wait = record = synchronize = _nothing


def _returning(value: Any) -> Callable[..., Any]:
    """A function of its own for each name: Dynamo has a rule for each, by the object."""
    return lambda *_, **__: value() if isinstance(value, type) else value


_DOES_NOTHING = (
    "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "set_rng_state", "manual_seed",
    "manual_seed_all", "set_stream", "set_per_process_memory_fraction",
)  # fmt: skip
_BYTES = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
_STANDS_FOR: dict[str, Any] = {
    **{name: _returning(None) for name in _DOES_NOTHING},
    **{name: _returning(0) for name in _BYTES},
    **{name: _returning(Stream) for name in ("stream", "current_stream", "default_stream")},
    "Stream": type("Stream", (Stream,), {}),
    "Event": type("Event", (Stream,), {}),
    "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu"),
}
"""What a program does with a GPU between its compiled calls; what it asks of it needs `--arch`."""
