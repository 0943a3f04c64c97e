"""Recompiles of all ranks -> which guard, how often, on which ranks, at which line, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import CompileRecord, RankDigest, Recompile, RecompileCause
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.text.lines import users, with_whole_path
from tpcompile.evidence.text.phrases import listed
from tpcompile.evidence.text.reasons import Reason, ReasonKind, nearest_reason, parse_reason

_LOCAL = re.compile(r"^L\['(.*?)'\]")
MAX_VALUES = 4
"""Changes of value shown per cause."""

ADVICE = {
    ReasonKind.SIZE: (
        "torch._dynamo.mark_dynamic({source}, {dim}) on every rank before the first call",
        "pad {source} to one size",
    ),
    ReasonKind.SIZE_BOUND: (
        "torch specialises on sizes 0 and 1: torch._dynamo.decorators.mark_unbacked({source}, {dim}) before the first "
        "call",
    ),
    ReasonKind.STRIDE: ("call {source}.contiguous() before the compiled region, on every rank",),
    ReasonKind.DTYPE: ("cast {source} to one dtype before the compiled region",),
    ReasonKind.REQUIRES_GRAD: ("detach() {source} in every call",),
    ReasonKind.NUM_DIMS: ("give {source} one number of dimensions in every call (unsqueeze, flatten)",),
    ReasonKind.DISPATCH_KEYS: (
        "create {source} in the same mode in every call: always under inference_mode, or never",
    ),
    ReasonKind.TENSOR_TYPE: ("unwrap {source} before the compiled region, so that it has one tensor class",),
    ReasonKind.DYNAMIC_MARK: ("mark the tensor dynamic before the first call, on every rank",),
    ReasonKind.GLOBAL_STATE: ("set {expected} once, before the first call, and on every rank",),
    ReasonKind.TRAINING: ("call train() or eval() once, before the first call",),
    ReasonKind.MODULE_INT: ("keep {source} in a tensor (a buffer)",),
    ReasonKind.NUMBER: ("pass {source} as a 0-dim tensor",),
    ReasonKind.VALUE: ("keep {source} equal in every call",),
    ReasonKind.LENGTH: ("keep the length of {source} constant (pad the list)",),
    ReasonKind.KEYS: ("keep the keys of {source} and their order constant",),
    ReasonKind.IDENTITY: ("create {source} once, outside of the loop, and pass the same object",),
    ReasonKind.DUPLICATE: ("pass two tensors in every call, a clone where they are one",),
    ReasonKind.TYPE: ("pass {source} with one Python type in every call",),
}
"""What keeps torch from compiling again, one way each; each has a program in tests/advice/test_recompiles.py."""


def recompile_of(compile_: CompileRecord, *, frame: str) -> Recompile:
    """The recompile of a record that has reasons, with the user's line.

    That is the line that torch names, or else the guard's, or else the frame's. Torch gives one reason per cache entry;
    the reason of the closest entry is taken.
    """
    reason = parse_reason(nearest_reason(compile_.recompile_reasons))
    line = users(reason.line)
    if line is None and reason.source:
        # where the program first reads the value
        names = (reason.source, f"L['{reason.source}']")
        asked = [guard for guard in compile_.guards if guard.source in names]
        line = users(first(lines_of(asked)))
    line = line or compile_.line
    if line is not None:
        files = {frame.file for frame in compile_.stack}
        line = with_whole_path(line, files)
    text = f"{reason.entry}: {reason.guard}" if reason.entry else reason.guard
    return Recompile(phase=compile_.phase, frame=frame, reason=text, line=line)


def recompile_causes(
    digests: Sequence[RankDigest], *, expected_phases: Sequence[str] = ()
) -> tuple[RecompileCause, ...]:
    """Recompiles of all ranks by guard and line, most frequent first. `expected_phases` recompile by design and are
    left out."""
    by_cause: dict[tuple[object, ...], list[_Seen]] = {}
    for digest in digests:
        for recompile in digest.recompiles:
            if recompile.phase not in expected_phases:
                reason = parse_reason(recompile.reason)
                what = reason.source or reason.guard
                cause = (recompile.frame, reason.kind, what, reason.dim, str(recompile.line))
                by_cause.setdefault(cause, []).append(_Seen(digest.rank, recompile, reason))
    causes = map(_cause, by_cause.values())
    return tuple(sorted(causes, key=lambda cause: (-cause.count, cause.frame, cause.guard)))


@dataclass(frozen=True)
class _Seen:
    rank: int
    recompile: Recompile
    reason: Reason


def _cause(seen: Sequence[_Seen]) -> RecompileCause:
    first, reason = seen[0], seen[0].reason
    # torch does not log the actual value of every guard
    reasons = [one.reason for one in seen]
    changes = [f"{one.expected} -> {one.actual}" if one.actual else one.expected for one in reasons]
    return RecompileCause(
        guard=reason.guard,
        kind=reason.kind.value,
        count=len(seen),
        ranks=tuple(sorted({one.rank for one in seen})),
        phases=tuple(dict.fromkeys(one.recompile.phase for one in seen)),
        frame=first.recompile.frame,
        values=listed(changes, by=", ", at_most=MAX_VALUES),
        line=first.recompile.line,
        advice=_how_to_avoid(reason),
    )


def _how_to_avoid(reason: Reason) -> str:
    """The advice for a reason, in terms of the user's names and indices."""
    source = _LOCAL.sub(r"\1", reason.source) or "it"
    ways = "; or ".join(ADVICE.get(reason.kind, ()))
    return ways.format(source=source, dim=reason.dim, expected=reason.expected)
