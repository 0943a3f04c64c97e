"""A compile that only part of the ranks made -> the finding: which guard failed there, or why it is there at all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence import classify
from tpcompile.evidence.align import Slot, content
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.ranktext import ranks_text
from tpcompile.evidence.reasontext import Reason, ReasonKind, parse_reason
from tpcompile.evidence.records import (
    CompileDigest,
    Divergence,
    DivergenceClass,
    Item,
    Layer,
    RankDigest,
    RankGroup,
)
from tpcompile.evidence.rows import Fetch

_LOCAL = re.compile(r"L\['(\w+)'\]")
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
_STATE_CAUSES = {"grad_mode": Cause.REQUIRES_GRAD, "autocast": Cause.DTYPE, "default_dtype": Cause.DTYPE}
_SUBCLASS = re.compile(r"\b(?:AsyncCollectiveTensor|DTensor)\b")


def one_rank(
    slot: Slot, absent: tuple[int, ...], ranks: Sequence[RankDigest], fetch: Fetch, domain: str
) -> Iterator[Divergence]:
    """The finding for a compile that the `absent` ranks did not make."""
    found = _OneRank(slot, absent, ranks, fetch)
    cause = found.cause()
    yield Divergence(
        layer=Layer.GRAPH,
        cls=DivergenceClass.COLLECTIVES if found.hangs() else DivergenceClass.CONTENT,
        domain=domain,
        where=slot.where,
        groups=found.groups(cause),
        title=found.title(cause),
        cause=cause,
        guard=found.failure.guard if found.failure else "",
        held=_held(found.failure) if found.failure and found.earlier else "",
        step=slot.step,
        advice=cause.advice,
    )


class _OneRank:
    def __init__(self, slot: Slot, absent: tuple[int, ...], ranks: Sequence[RankDigest], fetch: Fetch) -> None:
        self.absent, self.ranks, self.fetch = absent, ranks, fetch
        self.present = tuple(sorted(slot.compiles))
        self.first = slot.compiles[self.present[0]]
        reason = self.first.recompile_reason
        self.failure = parse_reason(reason) if reason else None
        self.earlier = self._earlier()

    def _earlier(self) -> CompileDigest | None:
        """What the first absent rank compiled of the same frame: there the guard held.

        The counterpart of the cache entry whose guard failed here, if it has one, or else its newest compile.
        """
        ours = next(d.compiles for d in self.ranks if d.rank == self.present[0])
        entry = self.failure.entry if self.failure else ""
        before = (c for c in reversed(ours) if c.index < self.first.index and c.frame == self.first.frame)
        failed = next((c for c in before if c.compile_id == entry), None)
        theirs = next(d.compiles for d in self.ranks if d.rank == self.absent[0])
        of_frame = [c for c in reversed(theirs) if c.frame == self.first.frame]
        same = (c for c in of_frame if failed is not None and content(c) == content(failed))
        return next(same, None) or next(iter(of_frame), None)

    def hangs(self) -> bool:
        """True unless the new code issues what the ranks without it issue already."""
        if not self.first.num_items(Layer.COLLECTIVES):
            return False
        return self.earlier is None or self.earlier.sha(Layer.COLLECTIVES) != self.first.sha(Layer.COLLECTIVES)

    def cause(self) -> Cause:
        if self.first.limit_reached:
            return Cause.RECOMPILE_LIMIT
        if self.failure:
            grew = self.failure.kind == ReasonKind.SIZE and self.first.is_dynamic
            return Cause.AUTOMATIC_DYNAMIC if grew else reason_cause(self.failure)
        if self._breaks():
            return Cause.GRAPH_BREAK
        if self._fails():
            return Cause.COMPILE_FAILED
        idle = all(not d.compiles for d in self.ranks if d.rank in self.absent)
        never = self.earlier is None and (idle or len(self.absent) < len(self.present))
        return Cause.COMPILE_DISABLED if never else Cause.EXTRA_COMPILE

    def _breaks(self) -> bool:
        return any(classify.about(item).startswith(classify.BREAK) for item in self._program())

    def _fails(self) -> bool:
        return any(classify.about(item) == classify.FAILED for item in self._program())

    def _program(self) -> Sequence[Item]:
        return self.fetch(self.present[0], self.first.index, Layer.GRAPH, "")

    def title(self, cause: Cause) -> str:
        have, lack = ranks_text(self.present), ranks_text(self.absent)
        if cause == Cause.RECOMPILE_LIMIT:
            why = f": {self.failure.guard}" if self.failure else ""
            return f"recompile limit reached on rank {have} only, which runs eager from here on{why}"
        if self.failure:
            return f"recompiled on rank {have} only, not on rank {lack}: {self.failure.guard}"
        return f"compiled on rank {have} only, not on rank {lack}"

    def groups(self, cause: Cause) -> tuple[RankGroup, RankGroup]:
        """Both sides of the guard that failed, or the first line of what only one side compiled."""
        line = (self.failure.line if self.failure else None) or self.first.line
        there = self.earlier.line if self.earlier else self.first.line
        if self.failure:
            ours = self._guarded(self.present[0], self.first, self.failure)
            theirs = self._guarded(self.absent[0], self.earlier, self.failure)
        else:
            items = self._program()
            told = (i for i in items if cause == Cause.GRAPH_BREAK and classify.about(i).startswith(classify.BREAK))
            lined = (i for i in items if i.line is not None)
            ours, theirs = next(told, None) or next(lined, None) or next(iter(items), None), None
        compiled = RankGroup(ranks=self.present, item=ours, frame_line=line)
        did_not = RankGroup(ranks=self.absent, item=theirs, frame_line=there)
        # The odd ones out come last.
        return (compiled, did_not) if cause == Cause.COMPILE_DISABLED else (did_not, compiled)

    def _guarded(self, rank: int, compile_: CompileDigest | None, failure: Reason) -> Item | None:
        """What a rank has for the guarded value: the input's description, or its guard on it."""
        if compile_ is None or compile_.limit_reached:
            return None  # nothing was compiled for the value that exceeded the limit
        layer = Layer.INPUTS if failure.kind in _TENSOR_CAUSES else Layer.GUARDS
        if compile_.sha(layer) is None:
            return None
        items = self.fetch(rank, compile_.index, layer, "")
        return next((i for i in items if _short(classify.about(i)) == _short(failure.source)), None)


def reason_cause(reason: Reason) -> Cause:
    """Cause of a recompile by the guard that failed; what is no tensor property is a Python value."""
    if reason.kind == ReasonKind.GLOBAL_STATE:
        return _STATE_CAUSES.get(reason.expected.partition("(")[0], Cause.PYTHON_VALUE)
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
