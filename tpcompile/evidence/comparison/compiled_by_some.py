"""A compile that only some ranks made -> the finding: which guard failed on them, or why they compiled it."""

from __future__ import annotations

import re

from tpcompile.evidence.comparison.blamed import rank_group
from tpcompile.evidence.comparison.cache_entries import reason_of
from tpcompile.evidence.comparison.other_call import is_called_elsewhere, is_local, is_own_call
from tpcompile.evidence.comparison.whole_and_parts import Programs
from tpcompile.evidence.groups.align import Slot, content
from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.groups.domain import Seen
from tpcompile.evidence.iterables import find
from tpcompile.evidence.layers import process_settings as state
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.inputs import requires_grad_cause, shared_cause
from tpcompile.evidence.layers.row_text import headline, spoken
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
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.ranks import named_ranks
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
"""Properties of a tensor whose expected value the reason holds."""
_NOTHING = CompileDigest(index=-1, compile_id="", phase="", frame="", layers=())
"""The compile of a rank that made none."""
_BESIDE = "it issues no collective, so no rank waits in it"
Ranks = tuple[int, ...]
_VALUE_KINDS = (ReasonKind.MODULE_INT, ReasonKind.NUMBER, ReasonKind.VALUE, ReasonKind.TRAINING)


def compiled_alone(programs: Programs, slot: Slot, absent: Ranks) -> Divergence:
    """The finding for a compile that the `absent` ranks did not make; `programs` are those of their domain."""
    domain = programs.domain
    present = slot.compiles.ranks
    # The compile of a rank that still compiles has no graph, and says nothing yet.
    with_graph = slot.compiles.where(lambda compile_: compile_.num_items(Layer.GRAPH) > 0)
    rank = (with_graph or slot.compiles).ranks[0]
    ours = Seen(domain, rank, slot.compiles[rank])
    reason = reason_of(ours)
    if reason:
        found: _Alone = _Recompiled(programs, ours, present, absent, parse_reason(reason))
    else:
        found = _Alone(programs, ours, present, absent)
    cause = found.cause()
    return Divergence(
        layer=Layer.GRAPH,
        cls=found.severity(cause),
        domain=domain.name,
        where=slot.where,
        frame=slot.frame,
        groups=found.groups(cause),
        title=f"{found.title(cause)}{found.note(cause)}",
        cause=cause,
        guard=found.guard,
        held=found.held,
        step=slot.step,
        is_rank_known=cause not in (Cause.REGIONAL_COMPILE, Cause.EXTRA_COMPILE),
        advice=cause.advice,
    )


class _Alone:
    """A compile that only the present ranks made, and what the absent ranks compiled of the same frame."""

    guard = ""
    """The guard that failed."""
    held = ""
    """The same guard on the ranks where it held."""
    asked_at: UserLine | None = None
    """The user's line that made Dynamo guard the value."""

    def __init__(self, programs: Programs, ours: Seen, present: Ranks, absent: Ranks, *, entry: str = "") -> None:
        """`ours` is the compile on the first of the present ranks, `entry` the id of the entry whose guard failed."""
        self.programs, self.domain = programs, programs.domain
        self.ours, self.present, self.absent = ours, present, absent
        earlier = self._earlier(entry)
        self.has_earlier = earlier is not None
        self.are_absent_fewer = len(self.absent) < len(self.present)
        self.theirs = Seen(self.domain, self.absent[0], earlier or _NOTHING)
        """The compile of the same frame on the first absent rank, on which the guard held."""

    def _earlier(self, entry: str) -> CompileDigest | None:
        """The counterpart on the first absent rank of the cache entry whose guard failed, or else the newest compile of
        the frame there."""
        frame = self.ours.compile.frame
        theirs = self.domain.compiled(self.absent[0])
        newest = theirs.newest.get(frame)
        ours = self.domain.compiled(self.ours.rank)
        failed = ours.before(self.ours.compile, entry)
        if failed is None:
            return newest
        return theirs.newest_like.get((frame, content(failed)), newest)

    def severity(self, cause: Cause) -> DivergenceClass:
        """A hang where the new code has collectives that the ranks without it do not have; information where it only
        runs beside the program."""
        ours, theirs = self.ours.compile, self.theirs.compile
        our_sha = ours.sha(Layer.COLLECTIVES)
        their_sha = theirs.sha(Layer.COLLECTIVES)
        num_issued = ours.num_items(Layer.COLLECTIVES)
        is_different = our_sha != their_sha
        if num_issued > 0 and is_different:
            return DivergenceClass.COLLECTIVES
        if self.is_beside(cause):
            return DivergenceClass.LABEL
        return DivergenceClass.CONTENT

    def note(self, cause: Cause) -> str:
        """The reason for which it is listed only; empty where it is red."""
        if not self.is_beside(cause):
            return ""
        where = f"called from {self.ours.compile.called_from[-1]}; " if is_own_call(self.ours, self.absent) else ""
        return f"; {where}{_BESIDE}"

    def is_beside(self, cause: Cause) -> bool:
        """True for an extra function such as an evaluation on one rank, and for a call that only these ranks make."""
        return cause == Cause.EXTRA_COMPILE and (self.is_apart() or is_own_call(self.ours, self.absent))

    def is_apart(self) -> bool:
        """True when it issues no collective and the absent ranks compile neither the frame nor one in its place.

        A second compile of a frame that all ranks have is a recompile, also where the reason of it was not observed.
        """
        if self.has_earlier or self.ours.compile.num_items(Layer.COLLECTIVES) > 0:
            return False
        return not self.programs.are_others(self.ours, self.absent) or self.have_own_roles()

    def have_own_roles(self) -> bool:
        """True in a running program whose ranks call functions of their own, each from a different function.

        A learner and its actors do, for instance. None of these functions issues a collective, so no rank waits in one.
        """
        if not self.domain.is_running or self.has_earlier or not is_local(self.ours):
            return False
        others = list(self.programs.others(self.ours, self.absent))
        are_apart = (is_called_elsewhere(self.ours, other) and is_local(other) for other in others)
        return bool(others) and all(are_apart)

    def cause(self) -> Cause:
        """The cause for which these ranks compiled alone."""
        compile_ = self.ours.compile
        if compile_.limit_reached:
            return Cause.RECOMPILE_LIMIT
        kinds = {item.kind for item in self.ours.items(Layer.GRAPH)}
        if ItemKind.BREAK in kinds:
            return Cause.GRAPH_BREAK
        if ItemKind.FAILURE in kinds:
            return Cause.COMPILE_FAILED
        if self.programs.are_parts(self.ours, self.absent):
            return Cause.REGIONAL_COMPILE
        if self.has_earlier or self.have_own_roles():
            return Cause.EXTRA_COMPILE
        absent = self.domain.digests.among(self.absent)
        have_compiled_nothing = not absent.where(lambda digest: digest.compiles)
        if have_compiled_nothing or self.are_absent_fewer:
            return Cause.COMPILE_DISABLED
        return Cause.EXTRA_COMPILE

    def title(self, cause: Cause) -> str:
        """The difference: which ranks compiled the frame."""
        have = named_ranks(self.present)
        if cause == Cause.RECOMPILE_LIMIT:
            return f"{have} reached the recompile limit and fell back to eager"
        return f"{self.ours.compile.frame} compiled on {have} only, not on {named_ranks(self.absent)}"

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides, the odd ranks last."""
        ours, theirs = self.shown_items()
        nearest = self.theirs if self.has_earlier else self.ours
        compiled = rank_group(self.present, ours, self.ours.compile, cause, line=self.asked_at)
        did_not = rank_group(self.absent, theirs, nearest.compile, cause)
        is_odd = cause == Cause.COMPILE_DISABLED
        if cause == Cause.REGIONAL_COMPILE:
            is_odd = self.are_absent_fewer  # only a majority decides between the whole and its parts
        if is_odd:
            return compiled, did_not
        return did_not, compiled

    def shown_items(self) -> tuple[Item | None, Item | None]:
        """The items to show: of the present ranks the graph break, or else the first item with a line."""
        program = self.ours.items(Layer.GRAPH)
        shown = min(program, key=lambda item: (item.kind != ItemKind.BREAK, item.line is None), default=None)
        return shown, None


class _Recompiled(_Alone):
    """A compile because a guard failed."""

    def __init__(self, programs: Programs, ours: Seen, present: Ranks, absent: Ranks, failure: Reason) -> None:
        super().__init__(programs, ours, present, absent, entry=failure.entry)
        self.failure = failure
        self.guard, self.asked_at = failure.guard, failure.line
        self.held = _held(failure) if self.has_earlier else ""

    def is_beside(self, cause: Cause) -> bool:
        """True for a function that only these ranks compile, however often, and for a call that only they make."""
        return self.is_apart() or is_own_call(self.ours, self.absent)

    def cause(self) -> Cause:
        """The cause that the failed guard is about."""
        return Cause.RECOMPILE_LIMIT if self.ours.compile.limit_reached else reason_cause(self.failure)

    def title(self, cause: Cause) -> str:
        """The difference: the value that the guard expects and the actual one."""
        what = "fell back to eager" if cause == Cause.RECOMPILE_LIMIT else "recompiled"
        if self.are_absent_fewer:
            return f"{self._changed()}, {named_ranks(self.present)} {what} and {named_ranks(self.absent)} did not"
        return f"{self._changed()}, only {named_ranks(self.present)} {what}"

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides, the odd ranks last: where most ranks got a new value, those that did not are odd."""
        first_side, second_side = super().groups(cause)
        return (second_side, first_side) if self.are_absent_fewer else (first_side, second_side)

    def _changed(self) -> str:
        """The value that the guard expects and the actual one, `size[0] of x: 4 / 5`."""
        failure = self.failure
        about = f"{failure.what} of {spoken(failure.source)}"
        if failure.kind == ReasonKind.GLOBAL_STATE:
            # The setting that differs from the previous compile, by the guards of both.
            both = Items((self.theirs.observed(Layer.GUARDS), self.ours.observed(Layer.GUARDS)))
            rows = rows_of(both.only(lambda item: item.kind == ItemKind.SETTING), is_ordered=False)
            changed = find(rows, lambda row: row.is_full)
            if changed is not None:
                return headline(changed, (self.absent, self.present))
            return f"{', '.join(state.settings_changed(failure.expected))} changed"
        if failure.actual:
            note = ""
            if failure.kind == ReasonKind.SIZE and self.ours.compile.is_dynamic:
                note = ", dynamic from here on"
            return f"{about}: {failure.expected} / {failure.actual}{note}"
        if failure.kind == ReasonKind.REQUIRES_GRAD:
            return f"{about} is no longer {failure.expected}"
        return self._value()

    def _value(self) -> str:
        """The value that the guard compares with and the actual one, or else the guard."""
        guarded = self._guarded(self.ours)
        value = guarded.notes.get("value") if guarded else None
        is_comparison = self.failure.kind in _VALUE_KINDS
        if value and is_comparison:
            return f"{spoken(self.failure.source)} == {self.failure.expected} / {value}"
        return spoken(self.failure.guard)

    def shown_items(self) -> tuple[Item | None, Item | None]:
        """The items of the guarded value on both sides."""
        return self._guarded(self.ours), self._guarded(self.theirs)

    def _guarded(self, seen: Seen) -> Item | None:
        """The item of the guarded value on one rank: the input, or the guard on it."""
        if seen.compile.limit_reached:
            return None  # nothing was compiled for the value that exceeded the limit
        is_tensor = self.failure.kind in _TENSOR_CAUSES
        layer = Layer.INPUTS if is_tensor else Layer.GUARDS
        observed = seen.observed(layer)
        # Recompile reasons have `x` for `L['x']`.
        source = _LOCAL.sub(r"\1", self.failure.source)
        return find(observed, lambda item: _LOCAL.sub(r"\1", item.about) == source)


def reason_cause(reason: Reason) -> Cause:
    """Cause of a recompile by the guard that failed; a guard on anything but a tensor property is on a Python value."""
    if reason.kind == ReasonKind.REQUIRES_GRAD or reason.source.endswith(".requires_grad"):
        return requires_grad_cause(reason.source)
    if reason.kind == ReasonKind.GLOBAL_STATE:
        changed = state.settings_changed(reason.expected)
        return state.cause_of(changed[0] if changed else "")
    if reason.kind == ReasonKind.DUPLICATE:
        return shared_cause([reason.source])
    if reason.kind == ReasonKind.TYPE and _SUBCLASS.search(reason.guard):
        return Cause.TENSOR_SUBCLASS
    return _TENSOR_CAUSES.get(reason.kind, Cause.PYTHON_VALUE)


def _held(reason: Reason) -> str:
    """The guard as it holds on the absent ranks."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return f"{reason.expected} is unchanged since the first compile"
    if reason.kind in _NAMED:
        return f"{reason.what} of '{reason.source}' is {reason.expected}"
    return reason.guard
