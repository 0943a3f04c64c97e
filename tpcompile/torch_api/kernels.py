"""A user's Triton kernels and custom ops, as torch keeps them: private names, seen on torch 2.11.0 and 2.13.0.

    name                                                  why
    _higher_order_ops.triton_kernel_wrap                  a traced graph names a kernel by its index in a side table
    _library.custom_ops.OPDEFS                            the Python object of a custom op, by name
    CustomOpDef._qualname, _init_fn, _backward_fn, _backend_fns, ...    its name, and the functions it was made from
    _ops.OpOverloadPacket._qualified_op_name              the name of an op of torch.ops
    library._defs                                         names of ops that Python defined by torch.library.Library
    Autotuner.configs, keys, ..., Heuristics.values       what decides how Triton launches a kernel
    JITFunction.run, InterpretedFunction.run              what a launch in eager calls; Triton 3.6.0 and 3.9.0

`tests/torch_api/test_kernels.py` fails when torch moves one of them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.library import CustomOpDef

Check = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
"""(positional arguments, named arguments) of a call -> raises where they are wrong."""


def triton_kernel(index: int) -> Any:
    """A user's Triton kernel in a traced graph, by its index in torch's side table."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_kernel(index)


def triton_constants(index: int) -> dict[str, Any]:
    """Constant arguments of a launch in a traced graph, by their index in that table."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table.get_constant_args(index)


def custom_op_name(launcher: Any) -> str:
    """`namespace::op` of what torch.library.custom_op or triton_op made; empty for anything else."""
    return launcher._qualname if isinstance(launcher, CustomOpDef) else ""


def custom_op(name: str) -> Any:
    """What torch.library.custom_op or triton_op made under that name; None for an op that was made otherwise."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS.get(name)


def custom_op_function(op: CustomOpDef) -> Callable[..., Any]:
    """The function that torch.library.custom_op or triton_op made an op from."""
    function = op._init_fn
    if function.__qualname__.startswith("triton_op."):  # wraps it, and keeps it in its closure
        function = inspect.getclosurevars(function).nonlocals["fn"]
    return function


def custom_op_functions(name: str) -> list[Callable[..., Any]]:
    """The functions of a custom op that compute, its own first; empty for an op that was made otherwise."""
    op = custom_op(name)
    return [] if op is None else [custom_op_function(op), *op._backend_fns.values(), *custom_op_backward(op)]


def custom_op_backward(op: CustomOpDef) -> list[Callable[..., Any]]:
    """The backward that was registered with a custom op, and its context, if any."""
    parts = (op._backward_fn, op._setup_context_fn)
    return [part for part in parts if part is not None]


def op_name(op: Any) -> str:
    """`namespace::op` of an op of torch.ops; empty for anything else."""
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    return op.name().partition(".")[0] if isinstance(op, torch._ops.OpOverload) else ""


def custom_op_others(op: CustomOpDef) -> dict[str, Callable[..., Any]]:
    """What else was registered with a custom op: kernels of single devices, the fake kernel, the rule of vmap."""
    found = {"fake": op._abstract_fn, "vmap": op._vmap_fn}
    inner = inspect.unwrap(custom_op_function(op))
    for device, wrapped in op._backend_fns.items():
        around = inspect.getclosurevars(inspect.unwrap(wrapped)).nonlocals
        kernel = around.get("fn", op._init_fn)
        is_own = kernel is op._init_fn or inspect.unwrap(kernel) is inner
        if not is_own:
            found[f"on {device}"] = kernel
    return {name: function for name, function in found.items() if function is not None}


def is_defined_in_python(name: str) -> bool:
    """True where torch.library.Library defined `namespace::op`: it does not say what runs for it."""
    from torch.library import _defs

    return name in _defs


def triton_launch(wrapper: Any) -> dict[str, Any] | None:
    """What decides how a Triton kernel, autotuner or heuristic launches, and its function; None for anything else."""
    top = type(wrapper).__module__.partition(".")[0]
    if top != "triton" or not hasattr(wrapper, "fn"):
        return None
    names = ["fn", "configs", "keys", "reset_to_zero", "restore_value", "perf_model", "early_config_prune", "values"]
    for hook in ("pre_hook", "post_hook"):
        is_users = getattr(wrapper, f"user_defined_{hook}", False)
        if is_users:
            names.append(hook)
    return {name: getattr(wrapper, name) for name in names if hasattr(wrapper, name)}


def run_within(op: CustomOpDef, context: Callable[[Any], AbstractContextManager[None]], *, argument: str) -> None:
    """Run the function of a custom op inside a context from here on, in eager and in compiled code.

    The context is made of one argument of each call, or of None where the op has no argument of that name.
    """
    inner = custom_op_function(op)
    names = list(inspect.signature(inner).parameters)
    place = names.index(argument) if argument in names else None

    @functools.wraps(inner)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context(None if place is None else args[place]):
            return inner(*args, **kwargs)

    op.register_kernel(["cpu", "cuda"])(run)


class _CheckedOp(CustomOpDef):
    """A custom op whose calls in eager are checked first."""

    check: Check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.check(args, kwargs)
        return super().__call__(*args, **kwargs)


def checked_op(op: Any, check: Check) -> Any:
    """The same custom op, changed so that each call in eager is checked first; it keeps its `register_*` methods."""
    op.__class__ = _CheckedOp
    op.check = check
    return op


@contextmanager
def launches_seen(before: Callable[[Any], None]) -> Iterator[None]:
    """Call `before` with each kernel that is launched inside; what it raises stops the launch. Without Triton nothing.

    The kernels that Inductor generates are launched otherwise, and are not seen.
    """
    with ExitStack() as stack:
        for kind in _kinds():
            stack.enter_context(mock.patch.object(kind, "run", _checked(kind.run, before)))
        yield


def _kinds() -> list[Any]:
    if importlib.util.find_spec("triton") is None:
        return []
    from triton import knobs
    from triton.runtime.jit import JITFunction

    if not knobs.runtime.interpret:
        return [JITFunction]
    return [JITFunction, importlib.import_module("triton.runtime.interpreter").InterpretedFunction]  # needs numpy


def _checked(run: Callable[..., Any], before: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(run)
    def checked(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        before(kernel)
        return run(kernel, *args, **kwargs)

    return checked
