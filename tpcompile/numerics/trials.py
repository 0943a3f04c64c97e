"""Wrong results that no value explains -> the op, or the line, that makes them right when it is changed: by trying.

Where the reference makes with one op what ranks make with many (a cross entropy over a sharded vocabulary), the values
between have no equal, and those that have one are wrong. The run is then made again with one change, until the wrong
results are right on every rank: each change is a row of a table (repairs.py for values, attached.py for gradients).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.evidence.records import WrongOp
from tpcompile.numerics.agree import texts_of_all_ranks
from tpcompile.numerics.attached import Cut, attached, cuts_of
from tpcompile.numerics.judged import Known, allowed_for, kept_places
from tpcompile.numerics.op_names import SAME_VALUES
from tpcompile.numerics.repairs import REPAIRS, Repair, is_likely
from tpcompile.numerics.traced import Change, Trace, Value

_MOST = 32
"""Repairs that are tried at most."""
_LEAST_S = 20.0
"""A small program is tried for so long, although the search for its wrong op took no time."""
_RIGHT, _OVER = "right", "over"
"""What a rank says of its results, and one whose results are not right and whose time is up."""

RunAgain = Callable[[Change | None, AbstractContextManager[object]], Trace]
"""A change of the results of ops, and what is around the run -> the run."""


@dataclass(frozen=True)
class Trials:
    """Runs of one program with one thing changed. All ranks must try the same, and run the same ops."""

    trace: Trace
    run_again: RunAgain
    known: Known
    group: dist.ProcessGroup
    tolerance: float
    device: torch.device
    limit_s: float

    def repaired(self, wrong: Sequence[str]) -> WrongOp | None:
        """What makes the `wrong` results of this rank right, with those of all others.

        None where nothing does, where nothing did in `limit_s`, and where nothing is wrong on this rank.
        """
        backward = [name for name in wrong if self._is_gradient(self.trace.results[name])]
        forward = [name for name in wrong if name not in backward]
        is_forward = any(map(json.loads, self._all(json.dumps(bool(forward)))))
        if is_forward:
            return self._first_right(forward, self._values(forward))
        return self._first_right(backward, self._gradients(backward))

    def _is_gradient(self, place: int) -> bool:
        value = self.trace.values[place]
        is_copy = value.name in SAME_VALUES and bool(value.sources)
        return value.in_backward or (is_copy and self._is_gradient(value.sources[0]))

    def _first_right(
        self, wrong: Sequence[str], trials: Iterator[tuple[Change | None, AbstractContextManager[object], WrongOp]]
    ) -> WrongOp | None:
        deadline_s = time.monotonic() + max(self.limit_s, _LEAST_S)
        for change, around, item in trials:
            try:
                again = self.run_again(change, around)
            except Exception:  # of the program, which may need what it is without
                again = Trace()
            found = [again.values[place] for name, place in again.results.items() if name in wrong]
            is_right = len(found) == len(wrong) and all(map(self._is_right, found))
            says = self._all(_RIGHT if is_right else _OVER if time.monotonic() > deadline_s else "wrong")
            if set(says) == {_RIGHT}:
                return item if wrong else None
            if _OVER in says:
                return None
        return None

    def _values(self, wrong: Iterable[str]) -> Iterator[tuple[Change | None, AbstractContextManager[object], WrongOp]]:
        """Each op behind the wrong results with each repair that fits it, the likely ones first."""
        values = self.trace.values
        places = kept_places([value.name for value in values])
        number_of = {place: number for number, place in enumerate(places)}
        own = [(number_of[place], name) for place, name in self._between(wrong) if place in number_of]
        texts = self._all(json.dumps(own))
        tried = list(dict.fromkeys((number, name) for text in texts for number, name in json.loads(text)))[:_MOST]
        results: dict[int, Tensor] = {}
        if tried:
            self.run_again(_keep([number for number, _ in tried], results), nullcontext())
        # Ranks combine between two runs: in one, a rank that does not come to the op would let the others wait.
        shapes = json.dumps({number: list(result.shape) for number, result in sorted(results.items())})
        if len(set(self._all(shapes))) > 1:
            return
        for number, name in tried:
            if number in results:
                place, repair = places[number], REPAIRS[name]
                changed = repair.changed(results[number], values[place], self.group)
                item = _described(place, values[place], repair, size=self.group.size())
                yield _replace(number, changed), nullcontext(), item

    def _between(self, wrong: Iterable[str]) -> list[tuple[int, str]]:
        """(Place, repair) of what is behind wrong results, back to values that the reference has, likely ones first."""
        values = self.trace.values
        found: set[int] = set()
        left = [self.trace.results[name] for name in wrong]
        while left:
            place = left.pop()
            value = values[place]
            if place not in found and not (value.is_given or self._is_right(value)):
                found.add(place)
                left += value.sources
        tried = [(place, name) for place in found for name, repair in REPAIRS.items() if repair.fits(values[place])]
        return sorted(tried, key=lambda each: (not is_likely(values[each[0]]), each[0]))[:_MOST]

    def _gradients(
        self, wrong: Collection[str]
    ) -> Iterator[tuple[Change | None, AbstractContextManager[object], WrongOp]]:
        """Each line of the program that cuts a gradient off, without that."""
        cuts: list[Cut] = []
        self.run_again(None, cuts_of(cuts))
        own = list(dict.fromkeys(cuts))[:_MOST]
        if len(set(self._all(json.dumps([[cut.line.file, cut.line.line, cut.what] for cut in own])))) > 1:
            return
        for cut in own:
            yield None, attached(cut), cut.described(self.group.size())

    def _is_right(self, value: Value) -> bool:
        """True where the reference has it, or has it as a part of this rank."""
        numbers, allowed = value.tensor, allowed_for(value, self.tolerance)
        ranks = -1, self.group.rank()
        return numbers is not None and any(self.known.is_among(numbers, value.shape, of, allowed) for of in ranks)

    def _all(self, text: str) -> list[str]:
        return texts_of_all_ranks(text, self.group, self.device)


def _keep(numbers: Collection[int], results: dict[int, Tensor]) -> Change:
    def change(at: int, result: Tensor) -> Tensor:
        if at in numbers:
            results[at] = result.clone()
        return result

    return change


def _replace(number: int, changed: Tensor) -> Change:
    def change(at: int, result: Tensor) -> Tensor:
        return changed if at == number and changed.shape == result.shape else result

    return change


def _described(place: int, value: Value, repair: Repair, *, size: int) -> WrongOp:
    return WrongOp(
        about=value.name,
        line=value.line,
        module=value.module,
        place=place,
        size=size,
        got=value.shown,
        **repair.says(value, size),
    )
