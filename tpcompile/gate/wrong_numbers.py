"""Facts of all ranks -> why numbers are wrong: the compiler, or in what the ranks of a target differ; torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpcompile.choices import AnyMode
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.judgement.checks import Ranks
from tpcompile.evidence.records import Check, CheckId, CompilerLayer, Status, first_layer
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.gate.measurements import GateFacts

_SAME = 1e-6
"""Largest relative difference of two norms in float64 that count as equal."""

_EXPLAINED = (CheckId.FORWARD, CheckId.GRADIENTS, CheckId.EAGER)
"""Checks of numbers, which are red because of it."""


def with_compiler(mode: AnyMode, facts: ByRank[GateFacts], checks: Sequence[Check]) -> list[Check]:
    """The checks of numbers, behind the one of the compiler where the search found something."""
    found = {rank: known.wrong_compiled for rank, known in facts.items() if known.wrong_compiled}
    shown = first_layer(found)
    if shown is None:
        return list(checks)
    is_random = shown.layer is CompilerLayer.RANDOM
    ranks = tuple(sorted(found))
    check = Check(
        id=CheckId.COMPILER,
        mode=mode,
        status=Status.INFO if is_random else Status.FAIL,
        expected="compiled code computes what eager does, which is right",
        observed=shown.brief,
        details=(f"wrong on {named_ranks(ranks)}", *shown.details),
        line=shown.line,
        ranks=() if is_random else ranks,
    )
    update: dict[str, object] = {"status": Status.INFO} if is_random else {"is_consequence": True}
    return [check, *(one.changed(**update) if one.is_red and one.id in _EXPLAINED else one for one in checks)]


def differing(ranks: Ranks) -> str:
    """The difference between ranks of a domain: the values of their inputs, or else what their references return."""
    domains = [
        ByRank({digest.rank: GateFacts.model_validate(digest.facts) for digest in digests})
        for digests in by_domain(ranks.values()).values()
    ]
    for facts in domains:
        if facts.differ(lambda known: known.inputs):
            groups = " | ".join(named_ranks(group) for group in facts.groups(lambda known: known.inputs))
            return f"the values of the inputs differ between ranks: {groups}"
    for facts in domains:
        if not all(_is_near(facts.first.reference, known.reference) for known in facts.values()):
            return "the reference returns different values on different ranks, for equal inputs"
    return "no difference between the ranks was seen in inputs or reference"


def _is_near(one: Sequence[float], two: Sequence[float]) -> bool:
    """True where the norms are equal up to rounding; also where either is unknown."""
    if len(one) != len(two):
        return not (one and two)
    return all(math.isclose(a, b, rel_tol=_SAME) or a != a or b != b for a, b in zip(one, two, strict=True))
