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
from tpcompile.fastpath.registry import FastPath, TpSupport, add, dtype_name, tp_size
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
    """The first argument that a fast path cannot take, and why, in one line; empty when it can run."""
    return first(_unmet(path, arguments)) or ""


def _unmet(path: FastPath, arguments: Mapping[str, Any]) -> Iterator[str]:
    """Each requirement that the arguments do not meet, in one line."""
    for name, divisor in path.divisible.items():
        size, what = arguments[name], name
        if isinstance(size, Tensor):
            size, what = size.shape[-1:].numel(), f"the last dim of {name}"
        if size % divisor != 0:
            yield f"{what} is {size}, not a multiple of {divisor}; pad it, or call {path.replaces.__name__}"
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield from _unmet_by_tensor(path, name, value)


def _unmet_by_tensor(path: FastPath, name: str, tensor: Tensor) -> Iterator[str]:
    """The requirements on dtype, strides and device that one tensor does not meet."""
    takes = path.dtypes or (tensor.dtype,)
    if tensor.is_floating_point() and tensor.dtype not in takes:
        yield f"{name} is {dtype_name(tensor.dtype)}; it takes {', '.join(map(dtype_name, takes))}"
    if name in path.contiguous and not tensor.is_contiguous():
        shape, stride = tuple(tensor.shape), tensor.stride()
        yield f"{name} of shape {shape} has strides {stride}; pass {name}.contiguous()"
    if tensor.is_cuda and path.min_sm:
        major, minor = torch.cuda.get_device_capability(tensor.device)
        capability = 10 * major + minor
        if capability < path.min_sm:
            yield f"{name} is on a GPU of sm_{capability}, it needs sm_{path.min_sm}; call {path.replaces.__name__}"
    on_cpu = tensor.device.type == "cpu"
    if on_cpu and path.source.kernels and not _interprets():
        yield f"{name} is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1 before the kernels are imported"


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
        """Raise FastPathError when the launcher may not run: not on shards, or not with these arguments."""
        path, size = self.path, tp_size()
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if size > 1:
            where = f"was called where tensors are shards of {size} ranks; call {path.replaces.__name__} there"
            if not path.is_tp_aware:
                raise FastPathError(f"fast path {path.name} is not TP-aware (tp={path.tp}) and {where}")
            dtypes = frozenset[str]()
            if not path.dtypes:
                tensors = [value for value in bound.arguments.values() if isinstance(value, Tensor)]
                dtypes = frozenset(dtype_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point())
            if not is_certified(path, tp=size, dtypes=dtypes):
                raise FastPathError(f"{uncertified(path, tp=size, dtypes=dtypes)}; it {where}")
        why = requirements(path, bound.arguments)
        if why:
            raise FastPathError(f"fast path {path.name}: {why}")

    def exchange_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The exchange that a call was given; None when it has none."""
        bound = self.signature.bind_partial(*args, **kwargs)
        return bound.arguments.get("exchange")


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
