"""Collectives of each compile, compared across ranks before its code runs -> nothing, or the run ends with a check.

A comparison after the call would be too late: collectives that differ hang. The verdict reports all other differences.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tpcompile.config import JobConfig
from tpcompile.evidence.digests.digest import frame_name, layer_items
from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.layers.collectives import explained
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.records import Check, CheckId, CompileRecord, Item, Layer, Status
from tpcompile.evidence.text.lines import entered_at, in_program
from tpcompile.evidence.text.ranks import exact_ranks, named_ranks
from tpcompile.evidence.text.reasons import in_one_line
from tpcompile.gate.checks import COMPARED, STEADY
from tpcompile.gate.status import StatusBoard
from tpcompile.ranks.agree import agree
from tpcompile.ranks.store import RankStore

_SAME = "the same collectives on every rank"
_AFTER_BREAK_S = 20.0
"""Time for the rest of a frame to be compiled; the run is red by then, and this ends the wait for a rank that hangs."""


class _InPhase:
    def __init__(self, board: StatusBoard, store: RankStore, phase: str) -> None:
        self._board, self._store, self._phase = board, store, phase
        self._broken_since: dict[int, float] = {}

    def is_gone(self, rank: int) -> bool:
        """True when it will not come: dead, in a different phase, or for a while behind a graph break."""
        if self._board.is_gone(rank) or self._board.has_left(rank, self._phase):
            return True
        # Dynamo may run the rest of a call behind a break eagerly, and a collective there waits for this rank.
        if self._store.peek(_broken_in(self._phase, rank), bool) is None:
            return False
        now = time.monotonic()
        return now - self._broken_since.setdefault(rank, now) > _AFTER_BREAK_S


def _broken_in(phase: str, rank: int) -> str:
    return f"broken/{phase}/{rank}"


def _agreeing(rank: int) -> str:
    return f"agreeing/{rank}"


def is_agreeing(store: RankStore) -> bool:
    """True while any rank waits for the other ranks to compile the same: that wait has a timeout, and a check."""
    return any(store.peek(_agreeing(rank), bool) for rank in range(store.world_size))


class Agreement:
    """Compares across ranks, in mode C and for a target, the collectives of the n-th compile of a phase with any."""

    def __init__(self, store: RankStore, config: JobConfig, board: StatusBoard, end: Callable[[Check], None]) -> None:
        self._store, self._config, self._board, self._end = store, config, board, end
        self._counts: Counter[str] = Counter()  # by phase: a recompile of one rank must not shift the next phase
        self._last: tuple[tuple[str, ...], ...] | None = None
        self.mode = ""
        self.members: Sequence[int] = range(store.world_size)
        """Ranks that must compile the same as this one."""

    @property
    def _phase(self) -> str:
        return self._board.phase

    @property
    def _is_steady(self) -> bool:
        return self._phase == f"{self.mode}/{STEADY}"

    def on_compile(self, compile_: CompileRecord) -> None:
        """Called on every rank after a compile of a frame, before the new code runs."""
        if self.mode not in COMPARED or len(self.members) == 1:
            return
        if compile_.breaks:
            self._store.put(_broken_in(self._phase, self._store.rank), True)
        if compile_.failure:
            return  # a compile that failed issues nothing; its exception is what went wrong
        items = layer_items(compile_, Layer.COLLECTIVES)
        if not items:
            return  # no rank can hang in it; the verdict reports a compile that only some ranks have
        keys = _keys(items)
        unchanged, self._last = keys == self._last, keys
        if self._is_steady and unchanged:
            return  # perhaps a recompile of this rank alone, but its collectives still match those of the other ranks
        self._store.put(_agreeing(self._store.rank), True)
        for check in self._compare(compile_, items):
            self._end(check)
        self._store.put(_agreeing(self._store.rank), False)

    def _compare(self, compile_: CompileRecord, mine: Sequence[Item]) -> tuple[Check, ...]:
        """The failed check of this compile, the same on every rank; empty when the collectives are equal.

        The items are small, so they are exchanged whole, without a second request for details.
        """
        self._counts[self._phase] += 1
        number = self._counts[self._phase]
        others = _InPhase(self._board, self._store, self._phase)
        checks: tuple[Check, ...] = agree(
            self._store.under(f"compile/{self._phase}/of {exact_ranks(self.members)}/{number}"),
            self.members,
            tuple(mine),
            kind=tuple[Item, ...],
            decide=partial(self._judge, compile_),
            result=tuple[Check, ...],
            timeout_s=self._config.gate.store_timeout_s,
            gone=others.is_gone,
        )
        return checks

    def _judge(
        self, compile_: CompileRecord, brought: Mapping[int, tuple[Item, ...]], absent: Mapping[int, str]
    ) -> tuple[Check, ...]:
        issued = ByRank(brought)
        if absent:
            return (self._not_on_all(compile_, issued, absent),)
        odd = issued.unlike_most(_keys)
        return (self._differ(compile_, issued, odd),) if odd else ()

    def _not_on_all(
        self, compile_: CompileRecord, issued: ByRank[tuple[Item, ...]], absent: Mapping[int, str]
    ) -> Check:
        """The check of a compile that `absent` ranks do not have.

        In the steady phase, where no rank should compile, the ranks that compiled are to blame; otherwise the absent.
        """
        late = sorted(absent)
        new = ", not as in the calls before" if self._is_steady else ""
        has_left = all(self._board.has_left(rank, self._phase) for rank in late)
        until = "before leaving the phase" if has_left else f"within {self._config.gate.store_timeout_s:g} s"
        item = issued.first[0]
        check = self._check(
            f"all ranks compile the collectives of {frame_name(compile_)} in phase {self._phase}",
            f"{named_ranks(issued.ranks)} compiled {item.says}{new}; "
            f"{named_ranks(late)} did not {until} ({self._seen(absent)})",
            compile_,
            ranks=issued.ranks if self._is_steady else late,
        )
        return check.changed(line=item.line or check.line)

    def _differ(self, compile_: CompileRecord, issued: ByRank[tuple[Item, ...]], odd: Sequence[int]) -> Check:
        """The first collective that differs between the lowest of the `odd` ranks and the lowest of all other ranks."""
        sides = [odd[0], issued.without(odd).ranks[0]]
        items = Items(issued[rank] for rank in sides)
        explanation = explained(items, rows_of(items, is_ordered=True))
        row = explanation.row
        said = [(rank, item) for rank, item in zip(sides, row, strict=True) if item is not None]
        who, item = said[0]
        number = next(place for place, one in enumerate(issued[who]) if one is item)  # there may be equal ones
        alike = [rank for rank in issued.ranks if _keys(issued[rank]) == _keys(issued[who])]
        what = f"#{number} is on {named_ranks(alike)} only: {item.says}"
        if len(said) > 1:
            what = f"#{number} is " + " and ".join(f"{one.says} on rank {rank}" for rank, one in said)
        within = in_program(item.line, entered_at(compile_.line, compile_.stack))
        ranks, is_known = issued.blamed(_keys)
        check = self._check(_SAME, what + within, compile_, ranks=ranks)
        return check.changed(line=item.line, cause=explanation.cause, is_rank_known=is_known)

    def missing(self, phase: str, late: Sequence[int]) -> Check:
        """The check that fails when ranks do not arrive at a phase."""
        return Check(
            id=CheckId.ARRIVED,
            mode=phase.partition("/")[0],
            status=Status.FAIL,
            expected=f"all ranks at phase {phase} within {self._config.gate.store_timeout_s:g} s",
            observed=f"{named_ranks(late)} did not arrive ({self._seen(dict.fromkeys(late, ''))})",
            ranks=tuple(late),
        )

    def _seen(self, absent: Mapping[int, str]) -> str:
        """The last state of each rank, and what was wrong with what it sent."""
        texts = []
        for rank, problem in sorted(absent.items()):
            refused = f"; what it sent is not valid: {problem}" if problem else ""
            texts.append(f"rank {rank} last seen {self._board.last_seen(rank)}{refused}")
        return "; ".join(texts)

    def _check(self, expected: str, observed: str, compile_: CompileRecord, *, ranks: Sequence[int]) -> Check:
        return Check(
            id=CheckId.AGREED,
            mode=self.mode,
            status=Status.FAIL,
            expected=expected,
            observed=observed,
            details=tuple(map(in_one_line, compile_.recompile_reasons)),
            line=compile_.line,
            ranks=tuple(ranks),
        )


def _keys(items: Sequence[Item]) -> tuple[tuple[str, ...], ...]:
    return tuple(item.key for item in items)
