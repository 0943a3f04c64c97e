"""Facts of all ranks -> what to do about a target whose numbers are wrong; torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.judgement.checks import Ranks
from tpcompile.evidence.records import RankDigest
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.gate.measurements import GateFacts

_NAMES = "tpcompile.testing.check_numerics names its first wrong module (docs/tp-maths.md)"
_SAME = 1e-6
"""Relative difference of two norms in float64 from which on they are of different numbers."""


def advice(ranks: Ranks) -> str:
    """Where to look first: at the inputs or references, where ranks of a domain differ in them, or in the program."""
    domains = [_facts(digests) for digests in by_domain(ranks.values()).values()]
    for facts in domains:
        if facts.differ(lambda known: known.inputs):
            groups = " | ".join(named_ranks(group) for group in facts.groups(lambda known: known.inputs))
            return f"Give all ranks the same inputs, from one seed: their values differ ({groups})."
    for facts in domains:
        if not all(_is_near(facts.first.reference, known.reference) for known in facts.values()):
            return "Give the reference the same weights on all ranks: it returns different values for equal inputs."
    return f"No difference between the ranks was seen in inputs or reference, so look at the program: {_NAMES}."


def _facts(digests: Sequence[RankDigest]) -> ByRank[GateFacts]:
    return ByRank({digest.rank: GateFacts.model_validate(digest.facts) for digest in digests})


def _is_near(one: Sequence[float], two: Sequence[float]) -> bool:
    """True where the norms are equal up to rounding; also where either is unknown."""
    if len(one) != len(two):
        return not (one and two)
    return all(math.isclose(a, b, rel_tol=_SAME) or a != a or b != b for a, b in zip(one, two, strict=True))
