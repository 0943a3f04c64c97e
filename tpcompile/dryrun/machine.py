"""A program for GPUs on a machine without: its tensors are on meta, and what it compiles is traced, not lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

META = torch.device("meta")
_ON_GPU = ("cuda", "xpu")


class OnMeta(TorchFunctionMode):
    """What a program makes or moves to a GPU, and what it makes without a device, is on meta.

    FakeTensorMode would let tensors say `cuda`, but `module.to("cuda")` asks the driver before any mode is asked.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call with each device of a GPU replaced."""
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        args = tuple(map(_on_meta, args))
        kwargs = {name: _on_meta(value) if name == "device" else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def _on_meta(value: Any) -> Any:
    is_device = isinstance(value, torch.device) and value.type in _ON_GPU
    is_name = isinstance(value, str) and value.partition(":")[0] in _ON_GPU
    return META if is_device or is_name else value


@contextmanager
def without_gpu() -> Iterator[None]:
    """Tensors made within are on meta; calls that choose a GPU do nothing."""
    with ExitStack() as stack:
        stack.enter_context(OnMeta())
        stack.enter_context(META)
        yield


@contextmanager
def traced_only(backend: str) -> Iterator[None]:
    """Everything that is compiled within has this backend: Inductor would make code for a device that is not there."""
    real = torch.compile

    @functools.wraps(real)
    def compile_(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        for name in ("mode", "options"):  # of Inductor: other backends refuse them
            options.pop(name, None)
        return real(model, **{**options, "backend": backend})

    with (
        mock.patch.object(torch, "compile", compile_),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
    ):
        yield
