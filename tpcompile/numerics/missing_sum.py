"""Wrong results that no value explains -> the op whose result, combined over the ranks, makes them right: by trying.

Where the reference makes with one op what ranks make with many (a cross entropy over a sharded vocabulary), the values
between have no equal, and those that have one are wrong. The run is then made again, with the result of one of the ops
between summed over the ranks, or its mean or maximum taken, until the wrong results are right on every rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.evidence.records import MistakeKind, WrongOp
from tpcompile.numerics.agree import texts_of_all_ranks
from tpcompile.numerics.judged import LOOKUPS, Known, allowed_for, kept_places
from tpcompile.numerics.op_names import COLLECTIVES, MASKS, SAME_VALUES, STATISTICS
from tpcompile.numerics.traced import Change, Trace, Value

_MOST = 6
"""Ops that are tried at most."""
_LEAST_S = 20.0
"""A small program is tried for so long, although the search for its wrong op took no time."""
_RIGHT, _OVER = "right", "over"
"""What a rank says of its results, and one whose results are not right and whose time is up."""
_LIKELY = STATISTICS | MASKS | LOOKUPS | {"aten.sum"}
"""Ops whose result is often one rank's part of what it is used for: tried first."""
_NOT_SUMS = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
"""Part of an op's name -> what its results on all ranks are combined with, which is a sum for all others."""
_MEANS = "mean"


def missing_sum(
    wrong: Sequence[str],
    trace: Trace,
    run_again: Callable[[Change], Trace],
    known: Known,
    group: dist.ProcessGroup,
    *,
    tolerance: float,
    device: torch.device,
    limit_s: float,
) -> WrongOp | None:
    """The op whose result should have been combined, where that makes the `wrong` results of a forward pass right.

    None where there is no such op, where none was found in `limit_s`, and where nothing is wrong on this rank. All
    ranks must call it, and have run the same ops on equal shapes: those without a wrong result run along.
    """
    rank, size, values = group.rank(), group.size(), trace.values
    places = kept_places([value.name for value in values])
    starts = [trace.results[name] for name in wrong]
    own = _between(starts, values, known, rank=rank, tolerance=tolerance)
    numbers = [places.index(place) for place in own if place in places]
    texts = texts_of_all_ranks(json.dumps(numbers), group, device)
    tried = list(dict.fromkeys(number for text in texts for number in json.loads(text)))[:_MOST]
    results: dict[int, Tensor] = {}
    deadline_s = time.monotonic() + max(limit_s, _LEAST_S)
    if tried:
        run_again(_keep(tried, results))
    # Ranks combine between two runs: in one, a rank that does not come to the op would let the others wait.
    shapes = json.dumps({number: list(result.shape) for number, result in sorted(results.items())})
    if len(set(texts_of_all_ranks(shapes, group, device))) > 1:
        return None
    for number in filter(results.__contains__, tried):
        op = values[places[number]]
        total = _combined(results[number], op.name, group)
        again = run_again(_replace(number, total))
        found = [again.values[place] for name, place in again.results.items() if name in wrong]
        is_right = len(found) == len(wrong) and all(
            _is_right(value, known, rank=rank, tolerance=tolerance) for value in found
        )
        said = _RIGHT if is_right else _OVER if time.monotonic() > deadline_s else "wrong"
        says = texts_of_all_ranks(said, group, device)
        if set(says) == {_RIGHT}:
            return _described(places[number], op, size=size) if wrong else None
        if _OVER in says:
            return None
    return None


def _keep(numbers: Collection[int], results: dict[int, Tensor]) -> Change:
    def change(at: int, result: Tensor) -> Tensor:
        if at in numbers:
            results[at] = result.clone()
        return result

    return change


def _replace(number: int, total: Tensor) -> Change:
    def change(at: int, result: Tensor) -> Tensor:
        return total if at == number and total.shape == result.shape else result

    return change


def _between(wrong: Iterable[int], values: list[Value], known: Known, *, rank: int, tolerance: float) -> list[int]:
    """Places of the ops behind wrong results, back to values that the reference has, the likely ones first."""
    found: set[int] = set()
    left = list(wrong)
    while left:
        place = left.pop()
        value = values[place]
        is_known = value.is_given or _is_right(value, known, rank=rank, tolerance=tolerance)
        if place not in found and not is_known:
            found.add(place)
            left += value.sources
    tried = [place for place in found if _may_lack_a_sum(values[place])]
    return sorted(tried, key=lambda place: (values[place].name not in _LIKELY, place))[:_MOST]


def _may_lack_a_sum(value: Value) -> bool:
    is_collective = value.name.startswith(COLLECTIVES)
    return value.is_float and not value.in_backward and not is_collective and value.name not in SAME_VALUES


def _is_right(value: Value, known: Known, *, rank: int, tolerance: float) -> bool:
    """True where the reference has it, or has it as a part of this rank."""
    numbers, allowed = value.tensor, allowed_for(value, tolerance)
    return numbers is not None and any(known.is_among(numbers, value.shape, of, allowed) for of in (-1, rank))


def _combined(result: Tensor, name: str, group: dist.ProcessGroup) -> Tensor:
    op = next((op for part, op in _NOT_SUMS.items() if part in name), dist.ReduceOp.SUM)
    total = result.clone()
    dist.all_reduce(total, op, group=group)
    return total / group.size() if _MEANS in name else total


def _described(place: int, value: Value, *, size: int) -> WrongOp:
    is_statistic = value.name in STATISTICS
    return WrongOp(
        about=value.name,
        line=value.line,
        module=value.module,
        place=place,
        kind=MistakeKind.LOCAL_STATISTIC if is_statistic else MistakeKind.NOT_SUMMED,
        of="" if is_statistic else "and is used without it: with the sum the run is right",
        size=size,
        got=value.shown,
    )
