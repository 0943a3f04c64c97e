"""The variables of a frame, without keeping what they hold alive."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_REFERENCES = 4
"""References to a copy of variables that only its frame, `variables_of`, its caller and `sys.getrefcount` hold."""


@contextmanager
def variables_of(frame: FrameType) -> Iterator[Mapping[str, Any]]:
    """Give the variables of a frame, to be read inside of the block only.

    Up to Python 3.12 a frame keeps the copy of its variables that `f_locals` makes, and with it tensors that the
    program has released: the copy is cleared, unless the program holds it as its `locals()`.
    """
    values = frame.f_locals
    try:
        yield values
    finally:
        is_copy = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(values, dict)
        if is_copy and sys.getrefcount(values) <= _REFERENCES:
            values.clear()
