"""Launches of Triton kernels outside of compiled code, before they begin: seen on Triton 3.6.0 and 3.9.0.

    name                         why
    JITFunction.run              what a launch calls, that of an autotuned kernel too
    InterpretedFunction.run      the same in Triton's interpreter

`tests/torch_api/test_launches.py` fails when one of them moves.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock


@contextmanager
def seen(before: Callable[[Any], None]) -> Iterator[None]:
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
