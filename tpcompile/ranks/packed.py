"""What is sent over the store: long texts are compressed, and a verdict's lists of ranks are ranges.

Neither what a rank tells of many collectives with equal stacks, nor a verdict, grows with their number as JSON does.
"""

from __future__ import annotations

import base64
import zlib
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator

from tpcompile.evidence.records import Verdict
from tpcompile.evidence.records.bounds import MAX_BYTES
from tpcompile.evidence.text.ranks import exact_ranks, ranks_of_exact

_LONG = 2048
"""Characters from which a text is compressed: shorter ones gain too little for the time."""
_MARK = b"zlib "
"""What a compressed text begins with, and no JSON does."""
_RANGE, _MIN_RANGE = "ranks", 16
"""Key of a list of ranks that is sent as a text, and the length from which it is."""


def compressed(text: str) -> str:
    """A text as the store has it."""
    if len(text) < _LONG:
        return text
    return (_MARK + base64.b64encode(zlib.compress(text.encode()))).decode()


def expanded(raw: bytes) -> bytes:
    """The text that `compressed` made this of. Raises ValueError, also for one of more than MAX_BYTES."""
    if not raw.startswith(_MARK):
        return raw
    decoder = zlib.decompressobj()
    try:
        text = decoder.decompress(base64.b64decode(raw.removeprefix(_MARK), validate=True), MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if decoder.unconsumed_tail:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    return text


def packed(verdict: Verdict) -> Any:
    """A verdict as it is sent to each rank: lists of ranks as `0-4095`, whose length does not grow."""
    return _with_ranges(verdict.model_dump(mode="json"))


def _with_ranges(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_ranges(one) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    are_numbers = len(value) >= _MIN_RANGE and all(type(one) is int for one in value)
    if are_numbers and all(0 <= one < other for one, other in pairwise(value)):
        return {_RANGE: exact_ranks(value)}
    return [_with_ranges(one) for one in value]


def _without_ranges(value: Any, left: list[int]) -> Any:
    """Expand what `_with_ranges` made, to at most `left[0]` numbers in all. Raises ValueError."""
    if isinstance(value, dict):
        if value.keys() == {_RANGE}:
            ranks = ranks_of_exact(str(value[_RANGE]), at_most=left[0])
            left[0] -= len(ranks)
            return ranks
        return {name: _without_ranges(one, left) for name, one in value.items()}
    return [_without_ranges(one, left) for one in value] if isinstance(value, list) else value


def _unpacked(value: object) -> object:
    """Fields of the verdict that `packed` was given. Raises ValueError."""
    try:
        return _without_ranges(value, [MAX_BYTES // 2])
    except RecursionError as error:
        raise ValueError(str(error)) from None


PackedVerdict = Annotated[Verdict, BeforeValidator(_unpacked)]
