"""Wrong results that no value explains -> the op, or the line, that makes them right when it is changed: by trying.

Where the reference makes with one op what ranks make with many (a cross entropy over a sharded vocabulary), the values
between have no equal, and those that have one are wrong. The run is then made again with one change, until the wrong
results are right on every rank: each change is a row of a table (recut.py for parameters,
repairs.py for values, attached.py for gradients).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.evidence.records import WrongOp
from tpcompile.numerics.agree import texts_of_all_ranks
from tpcompile.numerics.attached import Cut, attached, cuts_of
from tpcompile.numerics.judged import Known, allowed_for, kept_places, of_gradients
from tpcompile.numerics.recut import Recut, first_use
from tpcompile.numerics.repairs import REPAIRS, Repair, is_likely
from tpcompile.numerics.trace import Change, Trace, Value

_MOST = 32
"""Repairs that are tried at most."""
_MOST_ALIKE = 16
"""Ops of one line that are repaired together at most: each takes a run."""
_LEAST_S = 20.0
"""A small program is tried for so long, although the search for its wrong op took no time."""
_RIGHT, _OVER = "right", "over"
"""What a rank says of its results, and one whose results are not right and whose time is up."""

Trial = tuple[Change | None, AbstractContextManager[object], WrongOp]
"""A change of the results of ops, what is around the run, and the finding if the run is right."""
RunAgain = Callable[[Change | None, AbstractContextManager[object]], Trace]
"""A change of the results of ops, and what is around the run -> the run."""


class _Ask(NamedTuple):
    """What a rank tells the others ahead of the trials."""

    is_open: bool
    may_be_rows: bool
    """Its finding may be what comes of other rows of a parameter than those that it should have."""
    is_forward: bool
    """A result of its forward pass is wrong."""
    recuts: list[str]
    changes: Sequence[tuple[Sequence[str], bool]]
    """Of each of these the parameters that it changes, and whether the rank has rows in an order of its own."""


@dataclass(frozen=True)
class Trials:
    """Runs of one program with one thing changed. All ranks must try the same, and run the same ops."""

    trace: Trace
    run_again: RunAgain
    known: Known
    group: dist.ProcessGroup
    among: dist.ProcessGroup
    """All ranks that run the program: along other axes of a mesh, too, ranks wait for each other."""
    tolerance: float
    device: torch.device
    limit_s: float
    recuts: Sequence[Recut] = ()
    """Other rows of parameters that may be tried."""
    recut: Callable[[Recut], AbstractContextManager[object]] = nullcontext
    """What is around a run with them."""

    def repaired(self, wrong: Sequence[str], *, is_open: bool, may_be_rows: bool = False) -> WrongOp | None:
        """What makes the `wrong` results of this rank right, with those of all others.

        `is_open` where this rank has no finding that is certain: if none is open on any rank, nothing is tried, but for
        other rows of parameters that some rank has in an order of its own, where a finding `may_be_rows`. None where
        nothing helps, where nothing did in `limit_s`, and where nothing is wrong on this rank.
        """
        gradients = of_gradients(self.trace.values)
        backward = [name for name in wrong if self.trace.results[name] in gradients]
        forward = [name for name in wrong if name not in backward]
        changes = [(recut.changes, recut.is_unusual) for recut in self.recuts]
        ask = _Ask(is_open, may_be_rows, bool(forward), [recut.key for recut in self.recuts], changes)
        asks = [_Ask(*json.loads(text)) for text in self._all(json.dumps(ask))]
        is_any_open, is_forward = any(ask.is_open for ask in asks), any(ask.is_forward for ask in asks)
        deadline_s = time.monotonic() + max(self.limit_s, _LEAST_S)
        is_found, item = self._first_right(wrong, self._cut_otherwise(asks), deadline_s)
        if is_found or not is_any_open:
            return item
        if is_forward:
            return self._first_right(forward, self._values(forward, deadline_s), deadline_s)[1]
        return self._first_right(backward, self._gradients(backward), deadline_s)[1]

    def _cut_otherwise(self, asks: Sequence[_Ask]) -> Iterator[Trial]:
        """Parameters with other rows; where none is open, those that some rank has in an order of its own."""
        if any(ask.recuts != asks[0].recuts for ask in asks):
            return
        is_open, may_be_rows = any(ask.is_open for ask in asks), any(ask.may_be_rows for ask in asks)
        given = {value.name: place for place, value in reversed(list(enumerate(self.trace.values))) if value.is_given}
        for recut, changes in zip(self.recuts, zip(*(ask.changes for ask in asks), strict=True), strict=True):
            names = [name for changed, _ in changes for name in changed]
            place = first_use(names, given)
            is_unusual = may_be_rows and any(unusual for _, unusual in changes)
            if place is not None and (is_open or is_unusual):
                value = self.trace.values[place]
                item = WrongOp(
                    about=value.name, line=value.line, module=value.module, place=place, is_given=True,
                    size=self.group.size(), of=value.name, **recut.says,
                )  # fmt: skip
                yield None, self.recut(recut), item

    def _first_right(
        self, wrong: Sequence[str], trials: Iterator[Trial], deadline_s: float
    ) -> tuple[bool, WrongOp | None]:
        """Whether one of the trials makes the results of all ranks right, and what is wrong then on this one."""
        for change, around, item in trials:
            again = self._run(change, around)
            found = [again.values[place] for name, place in again.results.items() if name in wrong]
            is_right = len(found) == len(wrong) and all(map(self._is_right, found))
            says = self._all(_RIGHT if is_right else _OVER if time.monotonic() > deadline_s else "wrong")
            if set(says) == {_RIGHT}:
                return True, item if wrong else None
            if _OVER in says:
                return False, None
        return False, None

    def _run(self, change: Change | None, around: AbstractContextManager[object]) -> Trace:
        try:
            return self.run_again(change, around)
        except Exception:  # of the program, which may need what is changed
            return Trace()

    def _values(self, wrong: Iterable[str], deadline_s: float) -> Iterator[Trial]:
        """Each op behind the wrong results with each repair that fits it, the likely ones first.

        A line runs once in each layer, and what is wrong with it is wrong each time: the op is repaired wherever it
        runs, then the one alone.
        """
        values = self.trace.values
        places = kept_places([value.name for value in values])
        number_of = {place: number for number, place in enumerate(places)}
        own = [(number_of[place], name) for place, name in self._between(wrong) if place in number_of]
        texts = self._all(json.dumps(own))
        found = list(dict.fromkeys((number, name) for text in texts for number, name in json.loads(text)))
        ops = {number: (values[places[number]].name, values[places[number]].line) for number, _ in found}
        tried: dict[tuple[tuple[int, ...], str], None] = {}
        for number, name in found:
            alike = sorted(at for at, repair in found if repair == name and ops[at] == ops[number])
            tried |= {(tuple(alike), name): None, ((number,), name): None}
        for numbers, name in list(tried)[:_MOST]:
            repair, place = REPAIRS[name], places[numbers[0]]
            changed = self._changed(numbers, repair, values[place], deadline_s)
            if changed is None:
                return
            yield _replace(changed), nullcontext(), _described(place, values[place], repair, size=self.group.size())

    def _changed(
        self, numbers: Sequence[int], repair: Repair, value: Value, deadline_s: float
    ) -> dict[int, Tensor] | None:
        """The repaired results of these ops; None where a rank does not come to one of them, and when the time is over.

        One after the other, as each is given what the one before it returns. Ranks combine between two runs: in one,
        a rank that does not come to the op would let the others wait.
        """
        changed: dict[int, Tensor] = {}
        for number in numbers[:_MOST_ALIKE]:
            results: dict[int, Tensor] = {}
            self._run(_keep(number, results, changed), nullcontext())
            shapes = json.dumps([list(result.shape) for result in results.values()])
            says = self._all(_OVER if time.monotonic() > deadline_s else shapes)
            if not results or _OVER in says or len(set(says)) > 1:
                return None
            changed[number] = repair.changed(results[number], value, self.group)
        return changed

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
        size = self.group.size()
        tried = [
            (place, name) for place in found for name, repair in REPAIRS.items() if repair.fits(place, values, size)
        ]
        return sorted(tried, key=lambda each: (not is_likely(values[each[0]]), each[0]))[:_MOST]

    def _gradients(self, wrong: Collection[str]) -> Iterator[Trial]:
        """Each line of the program that cuts a gradient off, without that."""
        cuts: list[Cut] = []
        self._run(None, cuts_of(cuts))
        own = list(dict.fromkeys(cuts))[:_MOST]
        if len(set(self._all(json.dumps([[cut.line.file, cut.line.line, cut.what] for cut in own])))) > 1:
            return
        for cut in own:
            yield None, attached(cut), cut.described(self.group.size())

    def _is_right(self, value: Value) -> bool:
        """True where the reference has it, or has it as a part of this rank."""
        return self.known.has(value, self.group.rank(), allowed_for(value, self.tolerance))

    def _all(self, text: str) -> list[str]:
        return texts_of_all_ranks(text, self.among, self.device)


def _keep(number: int, results: dict[int, Tensor], changed: Mapping[int, Tensor]) -> Change:
    replace = _replace(changed)

    def change(at: int, result: Tensor) -> Tensor:
        if at == number:
            results[at] = result.clone()
        return replace(at, result)

    return change


def _replace(changed: Mapping[int, Tensor]) -> Change:
    def change(at: int, result: Tensor) -> Tensor:
        other = changed.get(at)
        return result if other is None or other.shape != result.shape else other

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
