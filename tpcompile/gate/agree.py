"""Every compile, before its code runs -> all ranks would issue the same collectives, or the run ends.

Comparing afterwards would be too late: collectives that differ hang. What differs otherwise is left to the verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from tpcompile.config import RunConfig
from tpcompile.ranks.store import RankStore
from tpcompile.evidence.byrank import ByRank
from tpcompile.evidence.digest import frame_name, layer_items
from tpcompile.evidence.records import Check, CheckId, CompileRecord, Item, Layer, Status
from tpcompile.evidence.rows import first_difference
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.gate.checks import STEADY
from tpcompile.gate.status import StatusBoard
from tpcompile.gate.watch import ALARM


class Agreement:
    """Compares the collectives of the n-th compile of a phase of mode C that has any, across ranks."""

    def __init__(self, store: RankStore, config: RunConfig, board: StatusBoard, end: Callable[[Check], None]) -> None:
        self._store, self._config, self._board, self._end = store, config, board, end
        self._counts: Counter[str] = Counter()  # by phase: a recompile of one rank must not shift the next phase
        self._last: tuple[tuple[str, ...], ...] | None = None
        self.phase = ""
        self.mode = ""

    def on_compile(self, compile_: CompileRecord) -> None:
        """Called on every rank after a compile of a frame, before the new code runs."""
        if self.mode != "C" or self._store.world_size == 1:
            return
        items = layer_items(compile_, Layer.COLLECTIVES)
        if not items:
            return  # nobody can hang in it; if only one rank has it, the verdict says so
        self._counts[self.phase] += 1
        keys = _keys(items)
        unchanged, self._last = keys == self._last, keys
        self._store.put(self._key(self._store.rank), [i.model_dump(mode="json") for i in items])
        if self.phase == f"C/{STEADY}" and unchanged:
            return  # a recompile the others may not share, but one that cannot hang them
        self._compare(compile_, items)

    def _key(self, rank: int) -> str:
        return f"compile/{self.phase}/{self._counts[self.phase]}/{rank}"

    def _compare(self, compile_: CompileRecord, mine: Sequence[Item]) -> None:
        asked = {rank: self._key(rank) for rank in range(self._store.world_size)}
        found, late = self._store.gather(
            asked, timeout_s=self._config.gate.store_timeout_s, stop_at=ALARM, gone=self._board.is_gone
        )
        if late:
            self._end(self._one_rank(compile_, late))
        issued = ByRank(found).map(lambda items: tuple(Item.model_validate(item) for item in items))
        # Most ranks are right until proved wrong; of two halves, the one with the lowest rank.
        odd = issued.unlike_most(_keys)
        if odd:
            self._end(self._differ(compile_, issued, odd))

    def _one_rank(self, compile_: CompileRecord, late: Sequence[int]) -> Check:
        return self._check(
            f"all ranks compile {frame_name(compile_)} in phase {self.phase}",
            f"rank {self._store.rank} compiled it, rank {ranks_text(late)} did not within "
            f"{self._config.gate.store_timeout_s:g} s ({self._seen(late)})",
            compile_,
            ranks=late,
        )

    def _differ(self, compile_: CompileRecord, issued: ByRank[tuple[Item, ...]], odd: Sequence[int]) -> Check:
        """The first collective in which the lowest of the `odd` ranks leaves what the lowest of the others does."""
        sides = [odd[0], issued.without(odd).ranks[0]]
        number = first_difference(tuple(issued[rank] for rank in sides))
        said = [(rank, issued[rank][number]) for rank in sides if number < len(issued[rank])]
        who, first = said[0]
        what = f"#{number} is on rank {who} only: {first.says}"
        if len(said) > 1:
            what = f"#{number} is " + " and ".join(f"{item.says} on rank {who}" for who, item in said)
        check = self._check("the same collectives on every rank", what, compile_, ranks=odd)
        return check.model_copy(update={"line": first.line})

    def missing(self, phase: str, late: Sequence[int]) -> Check:
        """The check that fails when ranks do not arrive at a phase."""
        return Check(
            id=CheckId.ARRIVED,
            mode=phase.partition("/")[0],
            status=Status.FAIL,
            expected=f"all ranks at phase {phase} within {self._config.gate.store_timeout_s:g} s",
            observed=f"rank {ranks_text(late)} is missing ({self._seen(late)})",
            ranks=tuple(late),
        )

    def _seen(self, late: Sequence[int]) -> str:
        return "; ".join(f"rank {rank} last seen {self._board.last_seen(rank)}" for rank in late)

    def _check(self, expected: str, observed: str, compile_: CompileRecord, *, ranks: Sequence[int]) -> Check:
        return Check(
            id=CheckId.AGREED,
            mode="C",
            status=Status.FAIL,
            expected=expected,
            observed=observed,
            details=compile_.recompile_reasons,
            line=compile_.line,
            ranks=tuple(ranks),
        )


def _keys(items: Sequence[Item]) -> tuple[tuple[str, ...], ...]:
    """What is compared of each item, in order."""
    return tuple(item.key for item in items)
