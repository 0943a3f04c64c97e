"""A verdict <-> the text that each rank is sent: its length does not grow with the number of ranks."""

from __future__ import annotations

import base64
import json
import zlib
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BeforeValidator

from tpcompile.evidence.records import Verdict
from tpcompile.evidence.records.bounds import MAX_BYTES
from tpcompile.evidence.text.ranks import exact_ranks, ranks_of_exact

_RANGE, _MIN_RANGE = "ranks", 16
"""Key of a list of ranks that is sent as a text, and the length from which it is."""


def packed(verdict: Verdict) -> str:
    """A verdict as it is sent to each rank: compressed, with lists of ranks as `0-4095`, whose length does not grow."""
    data = json.dumps(_with_ranges(verdict.model_dump(mode="json")))
    return base64.b64encode(zlib.compress(data.encode())).decode()


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
    """JSON of what `packed` made. Raises ValueError."""
    if not isinstance(value, str):
        return value
    decoder = zlib.decompressobj()
    try:
        data = decoder.decompress(base64.b64decode(value, validate=True), MAX_BYTES)
        if decoder.unconsumed_tail:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        return _without_ranges(json.loads(data), [MAX_BYTES // 2])
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from None


PackedVerdict = Annotated[Verdict, BeforeValidator(_unpacked)]
