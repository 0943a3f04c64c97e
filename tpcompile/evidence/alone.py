"""A compile that only part of the ranks made -> the finding: which guard failed there, or why it is there at all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence import state
from tpcompile.evidence.align import Slot, content
from tpcompile.evidence.blamed import rank_group
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Domain
from tpcompile.evidence.entries import reason_of
from tpcompile.evidence.headline import headline, spoken
from tpcompile.evidence.layers.inputs import PARAMETERS
from tpcompile.evidence.layerspec import Row
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    ItemKind,
    Layer,
    RankGroup,
    UserLine,
)
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
    found = _Alone(domain, slot, absent)
    cause = found.cause()
    failure = found.failure
    return Divergence(
        layer=Layer.GRAPH,
        cls=found.severity(cause),
        domain=domain.name,
        where=slot.where,
        groups=found.groups(cause),
        title=found.title(cause),
        cause=cause,
        guard=failure.guard if failure else "",
        held=_held(failure) if failure and found.earlier else "",
        step=slot.step,
        is_rank_known=cause not in (Cause.REGIONAL_COMPILE, Cause.EXTRA_COMPILE),
        advice=f"{cause.advice} {_BESIDE}" if found.is_beside(cause) else cause.advice,
    )


@dataclass
class _Alone:
    """The compile, and what the absent ranks have of the same frame."""

    domain: Domain
    slot: Slot
    absent: tuple[int, ...]

    def __post_init__(self) -> None:
        self.present = tuple(sorted(self.slot.compiles))
        self.first = self.slot.compiles[self.present[0]]
        reason = reason_of(self.domain, self.present[0], self.first)
        self.failure = parse_reason(reason) if reason else None
        self.earlier = self._earlier()

    def _earlier(self) -> CompileDigest | None:
        """What the first absent rank compiled of the same frame: there the guard held.

        The counterpart of the cache entry whose guard failed here, if it has one, or else its newest compile.
        """
        entry = self.failure.entry if self.failure else ""
        ours = [c for c in self.domain.of_rank(self.present[0]).compiles if c.frame == self.first.frame]
        before = [c for c in ours if c.index < self.first.index and c.compile_id == entry]
        theirs = [c for c in self.domain.of_rank(self.absent[0]).compiles if c.frame == self.first.frame]
        same = [c for c in theirs if before and content(c) == content(before[-1])]
        candidates = same or theirs
        return candidates[-1] if candidates else None

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
        return cause == Cause.EXTRA_COMPILE and not self.hangs() and not self._has_counterpart()

    def _has_counterpart(self) -> bool:
        """True when the absent ranks compiled a function that these ranks did not."""
        shared = {c.frame for c in self.domain.of_rank(self.present[0]).compiles}
        return any(c.frame not in shared for rank in self.absent for c in self.domain.of_rank(rank).compiles)

    def cause(self) -> Cause:
        """Why these ranks compiled alone."""
        if self.first.limit_reached:
            return Cause.RECOMPILE_LIMIT
        if self.failure:
            return reason_cause(self.failure)
        kinds = {item.kind for item in self._program()}
        if ItemKind.BREAK in kinds:
            return Cause.GRAPH_BREAK
        if ItemKind.FAILURE in kinds:
            return Cause.COMPILE_FAILED
        if self._is_regional():
            return Cause.REGIONAL_COMPILE
        return Cause.COMPILE_DISABLED if self._was_never_compiled() else Cause.EXTRA_COMPILE

    def _was_never_compiled(self) -> bool:
        """True when the absent ranks are the odd ones."""
        is_idle = all(not self.domain.of_rank(rank).compiles for rank in self.absent)
        return self.earlier is None and (is_idle or len(self.absent) < len(self.present))

    def _is_regional(self) -> bool:
        """True when one side compiles a frame whose parts the other side compiles."""
        return any(self._is_regional_beside(rank) for rank in self.absent)

    def _is_regional_beside(self, other: int) -> bool:
        mine = self.present[0]
        shared = {c.frame for c in self.domain.of_rank(mine).compiles}
        theirs = [c for c in self.domain.of_rank(other).compiles if c.frame not in shared]
        is_whole = any(self._inlines(mine, self.first, c) for c in theirs)
        return is_whole or any(self._inlines(other, c, self.first) for c in theirs)

    def _inlines(self, rank: int, whole: CompileDigest, part: CompileDigest) -> bool:
        """True when `part` was entered from the function that a rank compiled, or ops of that come from part's own."""
        if part.line is None or whole.line is None or part.frame == whole.frame:
            return False
        if any(_is_inside(caller, whole.line, besides=part.line) for caller in part.callers):
            return True
        lines = [item.line for item in self.domain.items(rank, whole.index, Layer.GRAPH)]
        return any(line is not None and _is_inside(line, part.line, besides=whole.line) for line in lines)

    def _program(self) -> Sequence[Item]:
        return self.domain.items(self.present[0], self.first.index, Layer.GRAPH)

    def title(self, cause: Cause) -> str:
        """The difference: what the guard wants and what came, or who has compiled."""
        have = ranks_text(self.present)
        if self.failure:
            changed = self._changed(self.failure)
            is_limit = cause == Cause.RECOMPILE_LIMIT
            return f"{changed}, rank {have} {'runs eager' if is_limit else 'recompiled'} alone"
        if cause == Cause.RECOMPILE_LIMIT:
            return f"rank {have} reached the limit and runs eager"
        return f"{self.first.frame} compiled on rank {have} only, not on rank {ranks_text(self.absent)}"

    def _changed(self, failure: Reason) -> str:
        """What the guard wants and what came, `size[0] of x: 4 / 5`."""
        if failure.kind == ReasonKind.GLOBAL_STATE:
            return self._setting() or f"{', '.join(state.settings_changed(failure.expected))} changed"
        dim = "" if failure.dim is None else f"[{failure.dim}]"
        about = f"{failure.kind}{dim} of {spoken(failure.source)}"
        if failure.actual:
            grew = failure.kind == ReasonKind.SIZE and self.first.is_dynamic
            return f"{about}: {failure.expected} / {failure.actual}{', dynamic from here on' if grew else ''}"
        if failure.kind == ReasonKind.REQUIRES_GRAD:
            return f"{about} is no longer {failure.expected}"
        ours = self._guarded(self.present[0], self.first, failure)
        value = ours.notes.get("value", "") if ours else ""
        if failure.kind in _VALUE_KINDS and value:
            return f"{spoken(failure.source)} == {failure.expected} / {value}"
        return spoken(failure.guard)

    def _setting(self) -> str:
        """The setting of the process that differs from the compile before, by the guards of both."""
        if self.earlier is None:
            return ""
        before = self.domain.items(self.absent[0], self.earlier.index, Layer.GUARDS)
        now = self.domain.items(self.present[0], self.first.index, Layer.GUARDS)
        held = {item.about: item for item in before if item.kind == ItemKind.SETTING}
        rows = [(held.get(item.about), item) for item in now if item.kind == ItemKind.SETTING]
        changed = [row for row in rows if row[0] is not None and row[0].key != row[1].key]
        return headline(Row(changed[0]), (self.absent, self.present)) if changed else ""

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides of the guard that failed, or the first line of what only one side compiled; the odd ones last."""
        theirs: Item | None = None
        if self.failure:
            ours = self._guarded(self.present[0], self.first, self.failure)
            theirs = self._guarded(self.absent[0], self.earlier, self.failure)
        else:
            ours = self._first_told(cause)
        asked_at = self.failure.line if self.failure else None
        compiled = rank_group(self.present, ours, self.first, cause, line=asked_at)
        did_not = rank_group(self.absent, theirs, self.earlier or self.first, cause)
        return (compiled, did_not) if self._are_absent_odd(cause) else (did_not, compiled)

    def _are_absent_odd(self, cause: Cause) -> bool:
        """Who compiles the whole and who its parts is only told by the majority."""
        if cause == Cause.REGIONAL_COMPILE:
            return len(self.absent) < len(self.present)
        return cause == Cause.COMPILE_DISABLED

    def _first_told(self, cause: Cause) -> Item | None:
        """The break, or else the first item with a line."""
        items = self._program()
        told = [item for item in items if cause == Cause.GRAPH_BREAK and item.kind == ItemKind.BREAK]
        lined = [item for item in items if item.line is not None]
        return next(iter([*told, *lined, *items]), None)

    def _guarded(self, rank: int, compile_: CompileDigest | None, failure: Reason) -> Item | None:
        """What a rank has for the guarded value: the input's description, or its guard on it."""
        if compile_ is None or compile_.limit_reached:
            return None  # nothing was compiled for the value that exceeded the limit
        layer = Layer.INPUTS if failure.kind in _TENSOR_CAUSES else Layer.GUARDS
        if compile_.sha(layer) is None:
            return None
        items = self.domain.items(rank, compile_.index, layer)
        return next((item for item in items if _short(item.about) == _short(failure.source)), None)


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
        return state.cause_of(next(iter(state.settings_changed(reason.expected)), ""))
    if reason.kind == ReasonKind.DUPLICATE:
        return Cause.TIED_WEIGHTS if PARAMETERS in reason.source else Cause.ALIAS
    is_grad = reason.kind == ReasonKind.REQUIRES_GRAD or reason.source.endswith(".requires_grad")
    if is_grad:
        return Cause.FROZEN_PARAMETER if PARAMETERS in reason.source else Cause.REQUIRES_GRAD
    if reason.kind == ReasonKind.TYPE and _SUBCLASS.search(reason.guard):
        return Cause.TENSOR_SUBCLASS
    return _TENSOR_CAUSES.get(reason.kind, Cause.PYTHON_VALUE)


def _held(reason: Reason) -> str:
    """What is true where the guard held."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return f"{reason.expected} is as it was at the first compile"
    if reason.kind not in _TENSOR_CAUSES or reason.kind in (ReasonKind.SIZE_BOUND, ReasonKind.DYNAMIC_MARK):
        return reason.guard
    dim = "" if reason.dim is None else f"[{reason.dim}]"
    return f"{reason.kind}{dim} of '{reason.source}' is {reason.expected}"


def _short(source: str) -> str:
    """A source as recompile reasons print it: `L['x']` is `x`."""
    return _LOCAL.sub(r"\1", source)
