"""autograd.Functions as they are applied; seen on torch 2.11.0 and 2.13.0.

    name                                  why
    autograd.function._SingleLevelFunction  what `Function.apply` calls, also where a program kept `apply` by a name

tests/typecheck/test_by_hand.py fails where torch moved it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.autograd.function import _SingleLevelFunction

__all__ = ["around_functions"]

Around = Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any]
"""Class, arguments, and what applies it -> what the program gets."""


@contextmanager
def around_functions(around: Around) -> Iterator[None]:
    """Call `around` for every autograd.Function that is applied in this context."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        plain = super(_SingleLevelFunction, cls).apply
        return around(cls, args, partial(plain, *args, **kwargs))

    before = vars(_SingleLevelFunction).get("apply")
    _SingleLevelFunction.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del _SingleLevelFunction.apply
        else:
            _SingleLevelFunction.apply = before
