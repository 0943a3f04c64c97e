"""Launcher of a fused kernel -> fast path: what it assumes of its arguments is declared, and checked at each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import ConfigError, FastPathError
from tpcompile.evidence.iterables import first
from tpcompile.fastpath import peers
from tpcompile.fastpath.certificate import is_certified, uncertified
from tpcompile.fastpath.registry import FastPath, TpSupport, add, tp_size
from tpcompile.fastpath.source import declared, line_of, python_function, source_of
from tpcompile.torch_api import kernels as torch_kernels


def fast_path(
    name: str,
    *,
    replaces: Callable[..., Any],
    tp: TpSupport | str = TpSupport.NONE,
    contiguous: tuple[str, ...] = (),
    divisible: Mapping[str, int] | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    autograd: bool = False,
    min_sm: int = 0,
    files: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare the launcher of a fused kernel, a function or a custom op, under a name of its own.

    In eager, a call with arguments that do not meet what is declared raises FastPathError before anything is launched,
    and inside `tp_region` so does every call of one that is not TP-aware; in compiled code the gate and `check`
    refuse it. `contiguous`, `divisible`, `dtypes`, `min_sm` and `files` are those of `FastPath`. Raises ConfigError for
    a `tp` that is not a `TpSupport`, an argument that the launcher does not have, a name that is taken, a launcher
    without source, and a declared file that is not there.
    """
    try:
        supports = TpSupport(tp)
    except ValueError as error:
        raise ConfigError(f"fast path {name}: tp={tp!r} is none of {', '.join(TpSupport)}") from error

    def register(launcher: Callable[..., Any]) -> Callable[..., Any]:
        declared(launcher, files)
        function = python_function(launcher)
        assert function is not None, "its source was read"
        path = FastPath(
            name=name,
            replaces=replaces,
            tp=supports,
            launcher=launcher,
            line=line_of(function),
            contiguous=contiguous,
            divisible=dict(divisible or {}),
            dtypes=dtypes,
            autograd=autograd,
            min_sm=min_sm,
            files=files,
        )
        call = _Call(path, inspect.signature(function))
        unknown = sorted({*path.contiguous, *path.divisible} - call.signature.parameters.keys())
        if unknown:
            raise ConfigError(f"fast path {name}: {path.line.function} has no argument {', '.join(unknown)}")
        add(path)
        if path.exchanges:  # peers learn what its custom ops refuse, in compiled code as in eager
            for op in source_of(path.launcher).ops:
                torch_kernels.run_within(torch_kernels.custom_op(op), peers.launching, argument="state")
        return _guarded(call, launcher)

    return register


def requirements(path: FastPath, arguments: Mapping[str, Any]) -> str:
    """The arguments that a fast path cannot take, in one line; empty when it can run."""
    return first(filter(None, _unmet(path, arguments))) or ""


def _unmet(path: FastPath, arguments: Mapping[str, Any]) -> Iterator[str]:
    for name in path.divisible:
        yield _indivisible(path, name, arguments[name])
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield _of_dtype(path, name, value)
            yield _of_layout(path, name, value)
            yield _of_device(path, name, value)


def _indivisible(path: FastPath, name: str, value: Any) -> str:
    size, what = value, name
    divisor = path.divisible[name]
    if isinstance(value, Tensor):
        size, what = value.shape[-1:].numel(), f"the last dim of {name}"
    if size % divisor == 0:
        return ""
    instead = path.replaces.__name__
    return f"{what} is {size}, not a multiple of {divisor}; pad it, or call {instead}"


def _of_dtype(path: FastPath, name: str, tensor: Tensor) -> str:
    takes = path.dtypes or (tensor.dtype,)
    is_taken = tensor.dtype in takes
    if is_taken or not tensor.is_floating_point():
        return ""
    names = [str(dtype).removeprefix("torch.") for dtype in takes]
    found = str(tensor.dtype).removeprefix("torch.")
    return f"{name} is {found}; it takes {', '.join(names)}"


def _of_layout(path: FastPath, name: str, tensor: Tensor) -> str:
    if name not in path.contiguous or tensor.is_contiguous():
        return ""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return f"{name} of shape {shape} has strides {stride}; pass {name}.contiguous()"


def _of_device(path: FastPath, name: str, tensor: Tensor) -> str:
    if tensor.is_cuda and path.min_sm:
        major, minor = torch.cuda.get_device_capability(tensor.device)
        capability = 10 * major + minor
        if capability < path.min_sm:
            return f"{name} is on a GPU of sm_{capability}, it needs sm_{path.min_sm}; call {path.replaces.__name__}"
    on_cpu = tensor.device.type == "cpu"
    if on_cpu and path.source.kernels and not _interprets():
        return f"{name} is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1 before the kernels are imported"
    return ""


def _interprets() -> bool:
    """True when this process runs Triton kernels in Triton's interpreter, on CPU tensors."""
    import triton  # its kernels were found, so it is installed

    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True)
class _Call:
    """The checks of an eager call of a launcher; in compiled code the gate and the fake kernels check."""

    path: FastPath
    signature: inspect.Signature

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raise FastPathError when the launcher may not run."""
        path, size = self.path, tp_size()
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if size > 1:
            tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
            dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()}
            _check_on_shards(path, size, frozenset() if path.dtypes else frozenset(dtypes))
        why = requirements(path, bound.arguments)
        if why:
            raise FastPathError(f"fast path {path.name}: {why}")

    def exchange_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The exchange that a call was given; None when it has none."""
        bound = self.signature.bind_partial(*args, **kwargs)
        return bound.arguments.get("exchange")


def _check_on_shards(path: FastPath, size: int, dtypes: frozenset[str]) -> None:
    """Raise FastPathError unless it was proved for the shards of so many ranks, and for these element types."""
    where = f"was called where tensors are shards of {size} ranks; call {path.replaces.__name__} there"
    if not path.is_tp_aware:
        raise FastPathError(f"fast path {path.name} is not TP-aware (tp={path.tp}) and {where}")
    if not is_certified(path, tp=size, dtypes=dtypes):
        raise FastPathError(f"{uncertified(path, tp=size, dtypes=dtypes)}; it {where}")


def _guarded(call: _Call, launcher: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher with its calls checked; a custom op is changed in place, so that it remains a custom op."""
    if torch_kernels.custom_op_name(launcher):
        return torch_kernels.checked_op(launcher, call.check)

    def within(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[None]:
        return peers.calling(call.exchange_of(args, kwargs)) if call.path.exchanges else nullcontext()

    @functools.wraps(launcher)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return launcher(*args, **kwargs)
        with within(args, kwargs):
            call.check(args, kwargs)
            return launcher(*args, **kwargs)

    return checked
