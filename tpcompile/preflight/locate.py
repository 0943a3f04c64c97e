"""Two ranks' tensors of equal dtype and shape -> the first element that differs, without sending the tensors.

Hashes of 64 pieces narrow the search to one piece at a time; a billion elements take six questions to a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tpcompile.evidence.iterables import differ
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number
from tpcompile.preflight.conclusion import Groups, sides_text
from tpcompile.preflight.fingerprint import local_of, piece_hashes, raw_bytes
from tpcompile.ranks.exchange import Fetch

_PIECES = 64
"""Pieces that one question is about, and most elements that are sent themselves: 64**5 is a billion."""

Ask = Callable[[int, dict[str, Any], Any], Any]
"""(rank, {start, stop} in elements, type of the answer) -> that rank's `answer_elements`; None without an answer."""


class Question(Frozen):
    """What the judge of a preflight check asks a rank for: facts of a group, or elements of a tensor."""

    group: str = ""
    elements: str = ""
    """Name of the tensor."""
    start: Number | None = None
    """First element; None asks for the form."""
    stop: Number = 0


class Pieces(Frozen):
    """Elements start..stop of a tensor: hashes of pieces of it, or the few elements, each with its bits."""

    hashes: tuple[str, ...] = ()
    elements: tuple[tuple[str, str], ...] = ()


class Element(Frozen):
    """First element that differs, and its value on each of the given ranks."""

    index: tuple[int, ...]
    values: tuple[str, ...]


class Form(Frozen):
    """dtype and shape of a tensor whose elements can be compared."""

    dtype: str
    shape: tuple[Number, ...]

    @classmethod
    def of(cls, local: Tensor) -> Form | None:
        """None for a wrapper of several tensors, and for a tensor without data (meta)."""
        if hasattr(local, "__tensor_flatten__") or local.is_meta:
            return None
        return cls(dtype=str(local.dtype), shape=tuple(local.shape))


def answer_elements(tensor: Tensor | None, question: Question) -> Any:
    """The form for a question without `start`; else hashes of pieces of elements start..stop, or the few elements.

    None where there is no such tensor, or no such elements.
    """
    if tensor is None:
        return None
    local, start, stop = local_of(tensor), question.start, question.stop
    if start is None:
        form = Form.of(local)
        return form.model_dump(mode="json") if form else None
    if not start < stop <= local.numel():
        return None
    raw, size_bytes = raw_bytes(local), local.element_size()
    is_long = stop - start > _PIECES
    if is_long:
        first, end = start * size_bytes, stop * size_bytes
        piece_bytes = _piece(start, stop) * size_bytes
        return {"hashes": piece_hashes(raw, start=first, stop=end, size_bytes=piece_bytes)}
    elements = []
    rows = raw.view(-1, size_bytes)[start:stop].cpu()
    for index, element in enumerate(rows, start):
        bits = bytes(reversed(element.tolist())).hex()
        elements.append([_value(local, index), f"0x{bits}"])
    return {"elements": elements}


def locate(ask: Ask, ranks: Sequence[int], shape: Sequence[int]) -> Element | None:
    """First element in which ranks[0] and ranks[1] differ, with the values of all `ranks`; None without an answer."""
    start = 0
    stop = math.prod(shape)
    while stop - start > _PIECES:
        size = -(-(stop - start) // _piece(start, stop))
        hashes = _answers(ask, ranks[:2], start, stop, lambda answer: answer.hashes, size)
        number = _first_difference(hashes)
        if number is None:
            return None  # no answer, or the tensor changed during the search
        piece = _piece(start, stop)
        start, stop = start + number * piece, min(start + (number + 1) * piece, stop)
    elements = _answers(ask, ranks, start, stop, lambda answer: answer.elements, stop - start)
    place = _first_difference([[bits for _, bits in of_rank] for of_rank in elements[:2]])
    if place is None:
        return None
    pairs = [of_rank[place] for of_rank in elements]
    values = [value for value, _ in pairs]
    if values[0] == values[1]:  # they look equal: signed zeros, NaN payloads
        values = [f"{value} (bits {bits})" for value, bits in pairs]
    return Element(index=_unravel(start + place, shape), values=tuple(values))


def _answers(
    ask: Ask, ranks: Sequence[int], start: int, stop: int, part: Callable[[Pieces], Sequence[Any]], size: int
) -> list[Sequence[Any]]:
    """Part of the answers of all ranks for a span; empty when one of them does not answer with `size` entries."""
    answers = [ask(rank, {"start": start, "stop": stop}, Pieces) for rank in ranks]
    parts = [() if answer is None else part(answer) for answer in answers]
    return parts if all(len(one) == size for one in parts) else []


def _first_difference(rows: Sequence[Sequence[Any]]) -> int | None:
    """Index of the first place at which the rows differ; None when they do not differ, or there are none."""
    for place, column in enumerate(zip(*rows, strict=True)):
        if differ(column):
            return place
    return None


def located(fetch: Fetch, row: Groups, name: str) -> str:
    """`first difference at [3, 0]: 0.5 on rank 0, 0.25 on rank 1`, of a tensor in which the two largest groups differ.

    Empty when shapes or dtypes differ, or when no rank answers.
    """
    ranks, values = zip(*row, strict=True)
    if None in values:
        return ""  # a group of ranks does not have the tensor

    def ask(rank: int, span: dict[str, Any], kind: Any) -> Any:
        return fetch(rank, {"elements": name, **span}, kind)

    first_ranks = [group[0] for group in ranks]
    forms = [ask(rank, {}, Form) for rank in first_ranks]
    if None in forms:
        return ""
    form, *others = forms
    if any(other != form for other in others):
        return ""
    element = locate(ask, first_ranks, form.shape)
    if element is None:
        return ""
    return f"first difference at {list(element.index)}: {sides_text(zip(ranks, element.values, strict=True))}"


def _piece(start: int, stop: int) -> int:
    return -(-(stop - start) // _PIECES)


def _value(local: Tensor, index: int) -> str:
    try:
        return repr(local[_unravel(index, local.shape)].item())
    except (NotImplementedError, RuntimeError):  # packed dtypes below a byte have no scalar
        return "?"


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
