"""Cache entries that did not fit, and the compile that followed -> why the entry that was meant did not fit."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.domain import Domain
from tpcompile.evidence.records import CompileDigest, Item, Layer
from tpcompile.evidence.several import last
from tpcompile.evidence.text.reasons import nearest_reason, parse_reason


def reason_of(domain: Domain, rank: int, compile_: CompileDigest) -> str:
    """The reason of the entry whose inputs are most like those that came; "" for a first compile.

    Torch gives one reason per entry, the first guard that failed. With an entry for the prompt and one for a token, a
    parameter that was frozen fails in the second, and the size of the token in the first: that entry was never meant.
    """
    reasons = compile_.recompile_reasons
    if len(reasons) < 2:
        return nearest_reason(reasons)
    distances = [_distance(domain, rank, compile_, reason) for reason in reasons]
    known = [distance for distance in distances if distance is not None]
    if len(known) < len(reasons):
        return nearest_reason(reasons)
    smallest = min(known)
    return nearest_reason([reason for reason, distance in zip(reasons, known, strict=True) if distance == smallest])


def _distance(domain: Domain, rank: int, compile_: CompileDigest, reason: str) -> int | None:
    """Fields of inputs in which the entry of a reason and a compile differ; None where either was not observed."""
    entry = _entry(domain.of_rank(rank).compiles, parse_reason(reason).entry)
    if entry is None:
        return None
    before, now = _inputs(domain, rank, entry), _inputs(domain, rank, compile_)
    if not before or not now:
        return None
    pairs = [(before[about], item) for about, item in now.items() if about in before]
    return sum(_num_differing(theirs, ours) for theirs, ours in pairs)


def _entry(compiles: Sequence[CompileDigest], compile_id: str) -> CompileDigest | None:
    return last([compile_ for compile_ in compiles if compile_.compile_id == compile_id])


def _inputs(domain: Domain, rank: int, compile_: CompileDigest) -> dict[str, Item]:
    return {item.about: item for item in domain.observed(rank, compile_, Layer.INPUTS)}


def _num_differing(theirs: Item, ours: Item) -> int:
    return sum(theirs.fields[name] != ours.fields[name] for name in theirs.fields)
