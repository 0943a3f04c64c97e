"""Recompiles of all ranks -> which guard, how often, on which ranks, at which line, and what to do about it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpcompile.evidence.iterables import first, grouped
from tpcompile.evidence.records import CompileRecord, RankDigest, Recompile, RecompileCause, UserLine
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.text.lines import users, with_whole_path
from tpcompile.evidence.text.phrases import listed
from tpcompile.evidence.text.reasons import Reason, ReasonKind, nearest_reason, parse_reason

_LOCAL = re.compile(r"^L\['(.*?)'\]")
MAX_VALUES = 4
"""Changes of value shown per cause."""

_ADVICE = {
    ReasonKind.SIZE: (
        "torch._dynamo.mark_dynamic({source}, {dim}) on every rank before the first call; or pad to one size and "
        "keep it with torch._dynamo.mark_static({source}, {dim})"
    ),
    ReasonKind.SIZE_BOUND: (
        "torch specialises on sizes 0 and 1: torch._dynamo.decorators.mark_unbacked({source}, {dim}), or pad so that "
        "the size stays in the range of the guard"
    ),
    ReasonKind.STRIDE: "call {source}.contiguous() before the compiled region, on every rank",
    ReasonKind.DTYPE: "cast {source} to one dtype before the compiled region",
    ReasonKind.REQUIRES_GRAD: (
        "give {source} the same requires_grad in every call: detach() it, or keep inference and training apart and "
        "warm up both"
    ),
    ReasonKind.NUM_DIMS: "give {source} one number of dimensions in every call (unsqueeze, flatten)",
    ReasonKind.DEVICE: "move {source} to this rank's device before the compiled region",
    ReasonKind.DISPATCH_KEYS: ("create {source} in the same mode in every call: always under inference_mode, or never"),
    ReasonKind.TENSOR_TYPE: "wait for or unwrap {source}, so that it has one tensor class in every call",
    ReasonKind.DYNAMIC_MARK: "mark the tensor dynamic before the first call, not between calls, and on every rank",
    ReasonKind.GLOBAL_STATE: (
        "set {expected} once, before the first call, and on every rank; if both settings are meant (no_grad and "
        "grad), warm up both"
    ),
    ReasonKind.TRAINING: "call train() or eval() before the first call; if both are meant, warm up both on every rank",
    ReasonKind.MODULE_INT: (
        "set torch._dynamo.config.allow_unspec_int_on_nn_module = True, or keep {source} in a tensor (a buffer); "
        "best not to change it between calls"
    ),
    ReasonKind.NUMBER: "pass {source} as a 0-dim tensor, or stop changing it between calls",
    ReasonKind.VALUE: "keep {source} equal in every call, or warm up each of its few values on every rank",
    ReasonKind.LENGTH: "keep the length of {source} constant (pad the list), or stack its tensors along a dynamic dim",
    ReasonKind.KEYS: "keep the keys of {source} and their order constant, or pass a tuple of tensors",
    ReasonKind.IDENTITY: (
        "{source} is a different object in each call: create it once, outside of the loop, and pass the same object"
    ),
    ReasonKind.DUPLICATE: "pass two tensors, or one tensor twice, in every call and on every rank",
    ReasonKind.TYPE: "pass {source} with one Python type in every call",
    ReasonKind.OTHER: "TORCH_LOGS=recompiles_verbose lists every guard that failed",
}


def recompile_of(compile_: CompileRecord, *, frame: str) -> Recompile:
    """The recompile of a record that has reasons, with the user's line.

    That is the line that torch names, or else the guard's, or else the frame's. Torch gives one reason per cache entry;
    the reason of the closest entry is taken.
    """
    reason = parse_reason(nearest_reason(compile_.recompile_reasons))
    line = users(reason.line) or _line_of(reason.source, compile_)
    if line is not None:
        files = {frame.file for frame in compile_.stack}
        line = with_whole_path(line, files)
    text = f"{reason.entry}: {reason.guard}" if reason.entry else reason.guard
    return Recompile(phase=compile_.phase, frame=frame, reason=text, line=line)


def _line_of(source: str, compile_: CompileRecord) -> UserLine | None:
    """The line where the program first reads the value, by this compile's guard on the same source."""
    names = {source, f"L['{source}']"} if source else set[str]()
    asked = [guard for guard in compile_.guards if guard.source in names]
    return users(first(lines_of(asked))) or compile_.line


def recompile_causes(
    digests: Sequence[RankDigest], *, expected_phases: Sequence[str] = ()
) -> tuple[RecompileCause, ...]:
    """Recompiles of all ranks by guard and line, most frequent first. `expected_phases` recompile by design and are
    left out."""
    seen = [_Seen(digest.rank, recompile) for digest in digests for recompile in digest.recompiles]
    unasked = [one for one in seen if one.recompile.phase not in expected_phases]
    causes = map(_cause, grouped(unasked, lambda one: one.key).values())
    return tuple(sorted(causes, key=lambda cause: (-cause.count, cause.frame, cause.guard)))


@dataclass(frozen=True)
class _Seen:
    """One recompile of one rank."""

    rank: int
    recompile: Recompile

    @functools.cached_property
    def reason(self) -> Reason:
        """Which guard failed."""
        return parse_reason(self.recompile.reason)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for recompiles of one cause."""
        what = self.reason.source or self.reason.guard
        return self.recompile.frame, self.reason.kind, what, self.reason.dim, str(self.recompile.line)

    @property
    def change(self) -> str:
        """`8 -> 9`, or the expected value where torch does not log the actual one."""
        reason = self.reason
        return f"{reason.expected} -> {reason.actual}" if reason.actual else reason.expected


def _cause(seen: Sequence[_Seen]) -> RecompileCause:
    first = seen[0]
    return RecompileCause(
        guard=first.reason.guard,
        kind=first.reason.kind.value,
        count=len(seen),
        ranks=tuple(sorted({one.rank for one in seen})),
        phases=tuple(dict.fromkeys(one.recompile.phase for one in seen)),
        frame=first.recompile.frame,
        values=listed([one.change for one in seen], by=", ", at_most=MAX_VALUES),
        line=first.recompile.line,
        advice=advice_for(first.reason),
    )


def advice_for(reason: Reason) -> str:
    """How to avoid recompiles for this reason, in terms of the user's names and indices."""
    source = _LOCAL.sub(r"\1", reason.source)
    return _ADVICE[reason.kind].format(source=source or "it", dim=reason.dim, expected=reason.expected)
