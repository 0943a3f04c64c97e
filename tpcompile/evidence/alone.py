"""A compile that only part of the ranks made -> the finding: which guard failed there, or why it is there at all."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpcompile.evidence import state
from tpcompile.evidence.align import Slot, content
from tpcompile.evidence.blamed import rank_group
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Domain
from tpcompile.evidence.entries import reason_of
from tpcompile.evidence.headline import headline, spoken
from tpcompile.evidence.layers.inputs import requires_grad_cause, shared_cause
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    ItemKind,
    Layer,
    RankDigest,
    RankGroup,
    UserLine,
)
from tpcompile.evidence.records.base import known
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import first, last
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.evidence.text.reasons import Reason, ReasonKind, parse_reason

_LOCAL = re.compile(r"L\['(\w+)'\]")
_SUBCLASS = re.compile(r"\b(?:AsyncCollectiveTensor|DTensor)\b")
_TENSOR_CAUSES = {
    ReasonKind.SIZE: Cause.SHAPE,
    ReasonKind.SIZE_BOUND: Cause.SHAPE,
    ReasonKind.NUM_DIMS: Cause.SHAPE,
    ReasonKind.STRIDE: Cause.STRIDE,
    ReasonKind.DTYPE: Cause.DTYPE,
    ReasonKind.REQUIRES_GRAD: Cause.REQUIRES_GRAD,
    ReasonKind.DEVICE: Cause.DISPATCH_KEY,
    ReasonKind.DISPATCH_KEYS: Cause.DISPATCH_KEY,
    ReasonKind.TENSOR_TYPE: Cause.TENSOR_SUBCLASS,
    ReasonKind.DYNAMIC_MARK: Cause.AUTOMATIC_DYNAMIC,
}
_BESIDE = "It issues no collective, and no rank waits for another in it."
_VALUE_KINDS = (ReasonKind.MODULE_INT, ReasonKind.NUMBER, ReasonKind.VALUE, ReasonKind.TRAINING)


def compiled_alone(domain: Domain, slot: Slot, absent: tuple[int, ...]) -> Divergence:
    """The finding for a compile that the `absent` ranks did not make."""
    rank = min(slot.compiles)
    reason = reason_of(domain, rank, slot.compiles[rank])
    failure = parse_reason(reason) if reason else None
    found = _Recompiled(domain, slot, absent, failure) if failure else _Alone(domain, slot, absent)
    cause = found.cause()
    return Divergence(
        layer=Layer.GRAPH,
        cls=found.severity(cause),
        domain=domain.name,
        where=slot.where,
        groups=found.groups(cause),
        title=found.title(cause),
        cause=cause,
        guard=found.guard,
        held=found.held,
        step=slot.step,
        is_rank_known=cause not in (Cause.REGIONAL_COMPILE, Cause.EXTRA_COMPILE),
        advice=f"{cause.advice} {_BESIDE}" if found.is_beside(cause) else cause.advice,
    )


class _Alone:
    """The compile, and what the absent ranks have of the same frame."""

    guard = ""
    """The guard that failed."""
    held = ""
    """What is true where it held."""
    asked_at: UserLine | None = None
    """The line that asked for it."""

    def __init__(self, domain: Domain, slot: Slot, absent: tuple[int, ...], *, entry: str = "") -> None:
        """`entry` is the compile id of the cache entry that did not fit."""
        self.domain, self.absent = domain, absent
        self.present = tuple(sorted(slot.compiles))
        self.first = slot.compiles[self.present[0]]
        self.ours = domain.of_rank(self.present[0])
        self.others = [domain.of_rank(rank) for rank in absent]
        self.earlier = self._earlier(entry)

    @property
    def program(self) -> Sequence[Item]:
        """The program that only the present ranks have; asked for where no guard says why."""
        return self.domain.items(self.ours.rank, self.first.index, Layer.GRAPH)

    def _earlier(self, entry: str) -> CompileDigest | None:
        """What the first absent rank compiled of the same frame: there the guard held.

        The counterpart of the cache entry whose guard failed here, if it has one, or else its newest compile.
        """
        theirs = self.others[0].of_frame(self.first.frame)
        before = [c for c in self.ours.of_frame(self.first.frame) if c.index < self.first.index]
        contents = [content(c) for c in before if c.compile_id == entry][-1:]
        same = [c for c in theirs if content(c) in contents]
        return last(same or theirs)

    def hangs(self) -> bool:
        """True unless the new code issues what the ranks without it issue already."""
        if not self.first.num_items(Layer.COLLECTIVES):
            return False
        return self.earlier is None or self.earlier.sha(Layer.COLLECTIVES) != self.first.sha(Layer.COLLECTIVES)

    def severity(self, cause: Cause) -> DivergenceClass:
        """How bad it is: what only runs beside the program is information."""
        if self.hangs():
            return DivergenceClass.COLLECTIVES
        return DivergenceClass.LABEL if self.is_beside(cause) else DivergenceClass.CONTENT

    def is_beside(self, cause: Cause) -> bool:
        """True for a function of its own, as an evaluation on one rank: no collective, nothing in its place."""
        return cause == Cause.EXTRA_COMPILE and self._is_apart()

    def _is_apart(self) -> bool:
        return not self.hangs() and not any(map(self._not_shared, self.others))

    def _not_shared(self, other: RankDigest) -> list[CompileDigest]:
        """Compiles of functions that the first present rank did not compile."""
        shared = {c.frame for c in self.ours.compiles}
        return [c for c in other.compiles if c.frame not in shared]

    def cause(self) -> Cause:
        """Why these ranks compiled alone."""
        if self.first.limit_reached:
            return Cause.RECOMPILE_LIMIT
        kinds = {item.kind for item in self.program}
        if ItemKind.BREAK in kinds:
            return Cause.GRAPH_BREAK
        if ItemKind.FAILURE in kinds:
            return Cause.COMPILE_FAILED
        if any(map(self._is_regional_beside, self.others)):
            return Cause.REGIONAL_COMPILE
        return Cause.COMPILE_DISABLED if self._was_never_compiled() else Cause.EXTRA_COMPILE

    def _was_never_compiled(self) -> bool:
        """True when the absent ranks are the odd ones."""
        has_compiled = any(other.compiles for other in self.others)
        return self.earlier is None and (not has_compiled or self._are_fewer())

    def _are_fewer(self) -> bool:
        return len(self.absent) < len(self.present)

    def _is_regional_beside(self, other: RankDigest) -> bool:
        """True when one side compiles a frame whose parts the other side compiles."""
        theirs = self._not_shared(other)
        is_whole = any(self._inlines(self.ours, self.first, c) for c in theirs)
        return is_whole or any(self._inlines(other, c, self.first) for c in theirs)

    def _inlines(self, rank: RankDigest, whole: CompileDigest, part: CompileDigest) -> bool:
        """True when `part` was entered from the function that a rank compiled, or ops of that come from part's own."""
        if part.line is None or whole.line is None or part.frame == whole.frame:
            return False
        if any(_is_inside(caller, whole.line, besides=part.line) for caller in part.callers):
            return True
        lines = known(item.line for item in self.domain.items(rank.rank, whole.index, Layer.GRAPH))
        return any(_is_inside(line, part.line, besides=whole.line) for line in lines)

    def title(self, cause: Cause) -> str:
        """The difference: who has compiled."""
        have = ranks_text(self.present)
        if cause == Cause.RECOMPILE_LIMIT:
            return f"rank {have} reached the limit and runs eager"
        return f"{self.first.frame} compiled on rank {have} only, not on rank {ranks_text(self.absent)}"

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides; the odd ones last."""
        ours, theirs = self.told()
        compiled = rank_group(self.present, ours, self.first, cause, line=self.asked_at)
        did_not = rank_group(self.absent, theirs, self.earlier or self.first, cause)
        # Who compiles the whole and who its parts is only told by the majority.
        is_odd = self._are_fewer() if cause == Cause.REGIONAL_COMPILE else cause == Cause.COMPILE_DISABLED
        return (compiled, did_not) if is_odd else (did_not, compiled)

    def told(self) -> tuple[Item | None, Item | None]:
        """What both sides have: the break, or else the first item with a line, of what only one side compiled."""
        return min(self.program, key=lambda item: (item.kind != ItemKind.BREAK, item.line is None), default=None), None


class _Recompiled(_Alone):
    """A compile because a guard failed."""

    def __init__(self, domain: Domain, slot: Slot, absent: tuple[int, ...], failure: Reason) -> None:
        super().__init__(domain, slot, absent, entry=failure.entry)
        self.failure = failure
        self.guard, self.asked_at = failure.guard, failure.line
        self.held = _held(failure) if self.earlier else ""

    def is_beside(self, cause: Cause) -> bool:
        """True for such a function that only these ranks have, however often they compile it."""
        return self.earlier is None and self._is_apart()

    def cause(self) -> Cause:
        """What the guard that failed is about."""
        return Cause.RECOMPILE_LIMIT if self.first.limit_reached else reason_cause(self.failure)

    def title(self, cause: Cause) -> str:
        """The difference: what the guard wants and what came."""
        what = "runs eager" if cause == Cause.RECOMPILE_LIMIT else "recompiled"
        return f"{self._changed()}, rank {ranks_text(self.present)} {what} alone"

    def _changed(self) -> str:
        """What the guard wants and what came, `size[0] of x: 4 / 5`."""
        failure = self.failure
        if failure.kind == ReasonKind.GLOBAL_STATE:
            return self._setting() or f"{', '.join(state.settings_changed(failure.expected))} changed"
        about = f"{failure.what} of {spoken(failure.source)}"
        if failure.actual:
            grew = failure.kind == ReasonKind.SIZE and self.first.is_dynamic
            return f"{about}: {failure.expected} / {failure.actual}{', dynamic from here on' if grew else ''}"
        if failure.kind == ReasonKind.REQUIRES_GRAD:
            return f"{about} is no longer {failure.expected}"
        ours = first(self._guarded(self.ours, self.first))
        value = ours.notes.get("value", "") if ours else ""
        if failure.kind in _VALUE_KINDS and value:
            return f"{spoken(failure.source)} == {failure.expected} / {value}"
        return spoken(failure.guard)

    def _setting(self) -> str:
        """The setting of the process that differs from the compile before, by the guards of both."""
        if self.earlier is None:
            return ""
        before, now = self._settings(self.others[0], self.earlier), self._settings(self.ours, self.first)
        changed = first(row for row in rows_of((before, now), is_ordered=False) if row.is_full)
        return headline(changed, (self.absent, self.present)) if changed else ""

    def _settings(self, rank: RankDigest, compile_: CompileDigest) -> tuple[Item, ...]:
        guards = self.domain.items(rank.rank, compile_.index, Layer.GUARDS)
        return tuple(item for item in guards if item.kind == ItemKind.SETTING)

    def told(self) -> tuple[Item | None, Item | None]:
        """What both sides have for the guarded value."""
        return first(self._guarded(self.ours, self.first)), first(self._guarded(self.others[0], self.earlier))

    def _guarded(self, rank: RankDigest, compile_: CompileDigest | None) -> list[Item]:
        """What a rank has for the guarded value: the input's description, or its guard on it."""
        if compile_ is None or compile_.limit_reached:
            return []  # nothing was compiled for the value that exceeded the limit
        layer = Layer.INPUTS if self.failure.kind in _TENSOR_CAUSES else Layer.GUARDS
        items = self.domain.observed(rank.rank, compile_, layer)
        return [item for item in items if _short(item.about) == _short(self.failure.source)]


def _is_inside(line: UserLine, frame: UserLine, *, besides: UserLine) -> bool:
    """True when a line is in the function that begins at `frame`, and not in the one `besides` it."""
    name = frame.file, frame.function
    if (line.file, line.function) != name or line.line < frame.line:
        return False
    is_nearer = (besides.file, besides.function) == name and frame.line < besides.line <= line.line
    return not is_nearer


def reason_cause(reason: Reason) -> Cause:
    """Cause of a recompile by the guard that failed; what is no tensor property is a Python value."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return state.cause_of(first(state.settings_changed(reason.expected)) or "")
    if reason.kind == ReasonKind.DUPLICATE:
        return shared_cause([reason.source])
    if reason.kind == ReasonKind.REQUIRES_GRAD or reason.source.endswith(".requires_grad"):
        return requires_grad_cause(reason.source)
    if reason.kind == ReasonKind.TYPE and _SUBCLASS.search(reason.guard):
        return Cause.TENSOR_SUBCLASS
    return _TENSOR_CAUSES.get(reason.kind, Cause.PYTHON_VALUE)


def _held(reason: Reason) -> str:
    """What is true where the guard held."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return f"{reason.expected} is as it was at the first compile"
    if reason.kind not in _TENSOR_CAUSES or reason.kind in (ReasonKind.SIZE_BOUND, ReasonKind.DYNAMIC_MARK):
        return reason.guard
    return f"{reason.what} of '{reason.source}' is {reason.expected}"


def _short(source: str) -> str:
    """A source as recompile reasons print it: `L['x']` is `x`."""
    return _LOCAL.sub(r"\1", source)
