"""Triton's interpreter, made to round as GPUs do: seen on Triton 3.6.0 and 3.9.0.

Its conversion of float32 to bfloat16 truncates, which doubles the error of a kernel; GPUs round to nearest even. It
takes any number of warps. Its loads and atomics of 8 aligned bytes are single accesses of memory, so that processes
which share it can exchange words.
That of Triton 3.6 takes no number of a kernel's arguments as the end of a `range`, where numpy is 2.5 or newer.
It patches Triton's language again at each call of a function by a kernel, which takes most of the time of a call: here
a launch patches it once.
The interpreter needs numpy, which neither Triton nor tpcompile requires: nothing here is imported before it is used.

name                                     why
interpreter._convert_float               the conversion that truncates
InterpreterBuilder.create_masked_load    what a volatile load calls
InterpretedFunction.run                  what a launch calls
interpreter._patch_lang                  what a launch, and each call of a function in it, does first, and its scope
InterpretedFunction.rewrite              what a first launch does with the source of each function, and keeps
jit.mangle_type                          what a launch asks of each argument; the first imports Gluon, for half a second

`tests/torch_api/test_interpreted.py` fails when one of them moves.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch

from tpcompile.errors import PreflightError

_POLL_S = 5e-4
"""Pause of a volatile load: ranks that poll would take the cores that the other ranks need."""
_NUM_WARPS = (1, 2, 4, 8, 16, 32)
"""Numbers of warps that a GPU takes; the interpreter takes any."""


class _Interpreter(NamedTuple):
    """Triton's interpreter, and what it does before anything here changes it."""

    module: Any
    convert: Any
    masked_load: Any
    run: Any
    patch_lang: Any


_patched_in_launch: set[Any] | None = None
"""Modules of Triton's language that the launch which runs has patched; None while no launch runs."""


def like_gpus() -> None:
    """Round float32 to bfloat16 as GPUs do, and print no warnings of NaN and overflow, from here on in this process.

    A launch patches Triton's language once, whatever it calls. With a number of warps that no GPU takes it raises
    ValueError then. What a first launch imports is imported now: processes that are forked later share it. Raises
    PreflightError where numpy is not installed.
    """
    interpreter = _interpreter().module
    import numpy as np
    from triton.runtime.jit import mangle_type

    mangle_type(torch.ones(1))

    np.seterr(all="ignore")
    interpreter._convert_float = _rounded
    interpreter.InterpretedFunction.run = _run_with_warps
    interpreter._patch_lang = _patch_once


def rewrite(functions: Iterable[FunctionType]) -> None:
    """Do now what a first launch does with the kernels among these functions: processes that are forked share it."""
    kind = _interpreter().module.InterpretedFunction
    for function in functions:
        name, module = function.__name__, function.__globals__
        kernel = module.get(name)  # a decorator of Triton has replaced the function
        if isinstance(kernel, kind):
            kernel.rewrite()


def forget(function: FunctionType) -> None:
    """Read the source of a kernel again at its next launch: its code has changed."""
    module = sys.modules.get("triton.runtime.interpreter")
    if module is not None:
        module.InterpretedFunction.rewritten_fn.pop(function, None)


def patient() -> None:
    """Let a volatile load wait, from here on in this process, so that polls leave the cores to other ranks.

    Raises PreflightError where numpy is not installed.
    """
    _interpreter().module.InterpreterBuilder.create_masked_load = _patient_load


@functools.cache
def _interpreter() -> _Interpreter:
    try:
        import triton.runtime.interpreter as module
    except ModuleNotFoundError as error:
        raise PreflightError(
            f"Triton's interpreter needs {error.name}, which is not installed: pip install {error.name}"
        ) from error
    return _Interpreter(
        module,
        module._convert_float,
        module.InterpreterBuilder.create_masked_load,
        module.InterpretedFunction.run,
        module._patch_lang,
    )


def _patient_load(*given: Any) -> Any:
    is_volatile = given[-1]
    if is_volatile:
        time.sleep(_POLL_S)
    return _interpreter().masked_load(*given)


def _run_with_warps(self: Any, *args: Any, **kwargs: Any) -> Any:
    global _patched_in_launch
    num_warps = kwargs.get("num_warps", _NUM_WARPS[0])
    if num_warps not in _NUM_WARPS:
        raise ValueError(f"num_warps={num_warps}; a GPU takes {', '.join(map(str, _NUM_WARPS))}")
    _patched_in_launch = set()
    try:
        return _interpreter().run(self, *args, **kwargs)
    finally:
        _patched_in_launch = None


def _patch_once(fn: Any) -> Any:
    """The scope that restores the language; None for a function that finds it patched."""
    languages = _languages(fn)
    if _patched_in_launch is not None and languages:  # it says itself where a function sees no language
        if languages <= _patched_in_launch:
            return None
        _patched_in_launch.update(languages)
    scope = _interpreter().patch_lang(fn)
    for language in languages:
        scope.set_attr(language.tensor, "__index__", lambda value: int(value.handle.data.item()))
    return scope


@functools.cache
def _languages(fn: Any) -> frozenset[Any]:
    """The modules of Triton's language among the globals of a function."""
    import triton.language as tl

    modules = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return frozenset(module for module in modules if module in (tl, tl.core))


def _rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    import numpy as np
    import triton.language as tl

    if (source, target) != (tl.float32, tl.bfloat16):
        return _interpreter().convert(data, source, target, rounding_mode)
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(torch.bfloat16)
    return rounded.view(torch.uint16).numpy().reshape(data.shape)
