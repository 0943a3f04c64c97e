"""A compile that only part of the ranks made -> the finding: which guard failed there, or why it is there at all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from tpcompile.evidence import state
from tpcompile.evidence.align import Slot, content
from tpcompile.evidence.blamed import rank_group
from tpcompile.evidence.bygroup import Items
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.domain import Domain, Seen
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
    RankGroup,
    UserLine,
)
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.rows import rows_of
from tpcompile.evidence.several import decided, find, last, unlike
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
_NAMED = _TENSOR_CAUSES.keys() - {ReasonKind.SIZE_BOUND, ReasonKind.DYNAMIC_MARK}
"""Properties of a tensor that have a value of their own."""
_NOTHING = CompileDigest(index=-1, compile_id="", phase="", frame="", layers=())
"""A compile that was never made."""
_BESIDE = "It issues no collective, and no rank waits for another in it."
_VALUE_KINDS = (ReasonKind.MODULE_INT, ReasonKind.NUMBER, ReasonKind.VALUE, ReasonKind.TRAINING)


def compiled_alone(domain: Domain, slot: Slot, absent: tuple[int, ...]) -> Divergence:
    """The finding for a compile that the `absent` ranks did not make."""
    rank = min(slot.compiles)
    ours = Seen(domain, rank, slot.compiles[rank])
    reason = reason_of(ours)
    present = tuple(sorted(slot.compiles))
    found = _Recompiled(ours, present, absent, parse_reason(reason)) if reason else _Alone(ours, present, absent)
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

    def __init__(self, ours: Seen, present: tuple[int, ...], absent: tuple[int, ...], *, entry: str = "") -> None:
        """`entry` is the compile id of the cache entry that did not fit."""
        self.ours, self.domain = ours, ours.domain
        self.present, self.absent = present, absent
        earlier = self._earlier(entry)
        self.has_earlier = earlier is not None
        self.theirs = Seen(self.domain, absent[0], earlier or _NOTHING)
        """What the first absent rank compiled of the same frame: there the guard held."""

    def _earlier(self, entry: str) -> CompileDigest | None:
        """The counterpart of the cache entry that did not fit, if the rank has one, or else its newest compile."""
        frame = self.ours.compile.frame
        before = self.ours.digest.of_frame(frame)
        before = before[: before.index(self.ours.compile)]
        entries = [compile_ for compile_ in before if compile_.compile_id == entry]
        wanted = set(map(content, entries[-1:]))
        theirs = self.domain.digests[self.absent[0]].of_frame(frame)
        same = [compile_ for compile_ in theirs if content(compile_) in wanted]
        return last(same or theirs)

    @property
    def program(self) -> Sequence[Item]:
        """The program that only the present ranks have; asked for where no guard says why."""
        return self.ours.items(Layer.GRAPH)

    def hangs(self) -> bool:
        """True unless the new code issues what the ranks without it issue already."""
        ours, theirs = self.ours.compile, self.theirs.compile
        return ours.num_items(Layer.COLLECTIVES) > 0 and theirs.sha(Layer.COLLECTIVES) != ours.sha(Layer.COLLECTIVES)

    def severity(self, cause: Cause) -> DivergenceClass:
        """How bad it is: what only runs beside the program is information."""
        if self.hangs():
            return DivergenceClass.COLLECTIVES
        return DivergenceClass.LABEL if self.is_beside(cause) else DivergenceClass.CONTENT

    def is_beside(self, cause: Cause) -> bool:
        """True for a function of its own, as an evaluation on one rank: no collective, nothing in its place."""
        return cause == Cause.EXTRA_COMPILE and self.is_apart()

    def is_apart(self) -> bool:
        """True when no rank waits for another in it, and the absent ranks compile nothing in its place."""
        return not (self.hangs() or self.not_shared())

    def not_shared(self) -> list[Seen]:
        """Compiles on the absent ranks, of functions that the first present rank did not compile."""
        theirs = itertools.chain.from_iterable(map(self.domain.seen_by, self.absent))
        return unlike(theirs, self.domain.seen_by(self.ours.rank), lambda seen: seen.compile.frame)

    def cause(self) -> Cause:
        """Why these ranks compiled alone."""
        return decided(_CAUSES, self, otherwise=Cause.EXTRA_COMPILE)

    def has_reached_limit(self) -> bool:
        """True when the frame was compiled too often."""
        return self.ours.compile.limit_reached

    def is_broken(self) -> bool:
        """True when the graph ends early."""
        return self._has(ItemKind.BREAK)

    def is_failed(self) -> bool:
        """True when there is no graph."""
        return self._has(ItemKind.FAILURE)

    def _has(self, kind: ItemKind) -> bool:
        return any(item.kind == kind for item in self.program)

    def is_regional(self) -> bool:
        """True when one side compiles a frame whose parts the other side compiles."""
        return any(_inlines(self.ours, seen) or _inlines(seen, self.ours) for seen in self.not_shared())

    def is_missing_there(self) -> bool:
        """True when the absent ranks never compiled the frame, and are the odd ones."""
        idle = self.domain.digests.among(self.absent).where(lambda digest: not digest.compiles)
        return not self.has_earlier and (len(idle) == len(self.absent) or self._are_fewer())

    def _are_fewer(self) -> bool:
        return len(self.absent) < len(self.present)

    def title(self, cause: Cause) -> str:
        """The difference: who has compiled."""
        have = ranks_text(self.present)
        if cause == Cause.RECOMPILE_LIMIT:
            return f"rank {have} reached the limit and runs eager"
        return f"{self.ours.compile.frame} compiled on rank {have} only, not on rank {ranks_text(self.absent)}"

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides; the odd ones last."""
        ours, theirs = self.told()
        nearest = self.theirs if self.has_earlier else self.ours
        compiled = rank_group(self.present, ours, self.ours.compile, cause, line=self.asked_at)
        did_not = rank_group(self.absent, theirs, nearest.compile, cause)
        # Who compiles the whole and who its parts is only told by the majority.
        is_odd = self._are_fewer() if cause == Cause.REGIONAL_COMPILE else cause == Cause.COMPILE_DISABLED
        return (compiled, did_not) if is_odd else (did_not, compiled)

    def told(self) -> tuple[Item | None, Item | None]:
        """What both sides have: the break, or else the first item with a line, of what only one side compiled."""
        return min(self.program, key=lambda item: (item.kind != ItemKind.BREAK, item.line is None), default=None), None


class _Recompiled(_Alone):
    """A compile because a guard failed."""

    def __init__(self, ours: Seen, present: tuple[int, ...], absent: tuple[int, ...], failure: Reason) -> None:
        super().__init__(ours, present, absent, entry=failure.entry)
        self.failure = failure
        self.guard, self.asked_at = failure.guard, failure.line
        self.held = _held(failure) if self.has_earlier else ""

    def is_beside(self, cause: Cause) -> bool:
        """True for such a function that only these ranks have, however often they compile it."""
        return not self.has_earlier and self.is_apart()

    def cause(self) -> Cause:
        """What the guard that failed is about."""
        return Cause.RECOMPILE_LIMIT if self.has_reached_limit() else reason_cause(self.failure)

    def title(self, cause: Cause) -> str:
        """The difference: what the guard wants and what came."""
        what = "runs eager" if cause == Cause.RECOMPILE_LIMIT else "recompiled"
        return f"{self._changed()}, rank {ranks_text(self.present)} {what} alone"

    def _changed(self) -> str:
        """What the guard wants and what came, `size[0] of x: 4 / 5`."""
        failure = self.failure
        about = f"{failure.what} of {spoken(failure.source)}"
        if failure.kind == ReasonKind.GLOBAL_STATE:
            return self._setting()
        if failure.actual:
            grew = failure.kind == ReasonKind.SIZE and self.ours.compile.is_dynamic
            return f"{about}: {failure.expected} / {failure.actual}{', dynamic from here on' if grew else ''}"
        if failure.kind == ReasonKind.REQUIRES_GRAD:
            return f"{about} is no longer {failure.expected}"
        return self._value()

    def _setting(self) -> str:
        """The setting of the process that differs from the compile before, by the guards of both."""
        both = Items((self.theirs.observed(Layer.GUARDS), self.ours.observed(Layer.GUARDS)))
        rows = rows_of(both.only(lambda item: item.kind == ItemKind.SETTING), is_ordered=False)
        changed = find(rows, lambda row: row.is_full)
        if changed is None:
            return f"{', '.join(state.settings_changed(self.failure.expected))} changed"
        return headline(changed, (self.absent, self.present))

    def _value(self) -> str:
        """The value that the guard compares with and the one that came, or else the guard."""
        ours, _ = self.told()
        value = ours.notes.get("value") if ours else None
        if value and self.failure.kind in _VALUE_KINDS:
            return f"{spoken(self.failure.source)} == {self.failure.expected} / {value}"
        return spoken(self.failure.guard)

    def told(self) -> tuple[Item | None, Item | None]:
        """What both sides have for the guarded value."""
        return self._guarded(self.ours), self._guarded(self.theirs)

    def _guarded(self, seen: Seen) -> Item | None:
        """What a rank has for the guarded value: the input's description, or its guard on it."""
        if seen.compile.limit_reached:
            return None  # nothing was compiled for the value that exceeded the limit
        layer = Layer.INPUTS if self.failure.kind in _TENSOR_CAUSES else Layer.GUARDS
        source = _short(self.failure.source)
        return find(seen.observed(layer), lambda item: _short(item.about) == source)


_CAUSES: tuple[tuple[Callable[[_Alone], bool], Cause], ...] = (
    (_Alone.has_reached_limit, Cause.RECOMPILE_LIMIT),
    (_Alone.is_broken, Cause.GRAPH_BREAK),
    (_Alone.is_failed, Cause.COMPILE_FAILED),
    (_Alone.is_regional, Cause.REGIONAL_COMPILE),
    (_Alone.is_missing_there, Cause.COMPILE_DISABLED),
)
"""Why ranks compiled alone without a guard that failed; the first that holds."""


def _inlines(whole: Seen, part: Seen) -> bool:
    """True when `part` was entered from the function compiled as `whole`, or ops of that come from part's own."""
    outer, inner = whole.compile.line, part.compile.line
    if outer is None or inner is None or part.compile.frame == whole.compile.frame:
        return False
    if _any_inside(part.compile.callers, outer, besides=inner):
        return True
    return _any_inside(lines_of(whole.items(Layer.GRAPH)), inner, besides=outer)


def _any_inside(lines: Iterable[UserLine], frame: UserLine, *, besides: UserLine) -> bool:
    return any(_is_inside(line, frame, besides=besides) for line in lines)


def _is_inside(line: UserLine, frame: UserLine, *, besides: UserLine) -> bool:
    """True when a line is in the function that begins at `frame`, and not in the one `besides` it."""
    name = frame.file, frame.function
    if (line.file, line.function) != name or line.line < frame.line:
        return False
    is_nearer = (besides.file, besides.function) == name and frame.line < besides.line <= line.line
    return not is_nearer


def reason_cause(reason: Reason) -> Cause:
    """Cause of a recompile by the guard that failed; what is no tensor property is a Python value."""
    if reason.source.endswith(".requires_grad"):
        return requires_grad_cause(reason.source)
    find = _FINDERS.get(reason.kind)
    return find(reason) if find else _TENSOR_CAUSES.get(reason.kind, Cause.PYTHON_VALUE)


def _of_state(reason: Reason) -> Cause:
    return state.cause_of("".join(state.settings_changed(reason.expected)[:1]))


def _of_type(reason: Reason) -> Cause:
    return Cause.TENSOR_SUBCLASS if _SUBCLASS.search(reason.guard) else Cause.PYTHON_VALUE


_FINDERS: Mapping[ReasonKind, Callable[[Reason], Cause]] = {
    ReasonKind.GLOBAL_STATE: _of_state,
    ReasonKind.DUPLICATE: lambda reason: shared_cause([reason.source]),
    ReasonKind.REQUIRES_GRAD: lambda reason: requires_grad_cause(reason.source),
    ReasonKind.TYPE: _of_type,
}
"""Kinds of guards whose text says which cause it is."""


def _held(reason: Reason) -> str:
    """What is true where the guard held."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return f"{reason.expected} is as it was at the first compile"
    if reason.kind in _NAMED:
        return f"{reason.what} of '{reason.source}' is {reason.expected}"
    return reason.guard


def _short(source: str) -> str:
    """A source as recompile reasons print it: `L['x']` is `x`."""
    return _LOCAL.sub(r"\1", source)
