"""The judge alone: what it asks which ranks, and which of the answers it reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tpcompile.evidence.comparison.compare import Allowed
from tpcompile.evidence.records import Status, Verdict
from tpcompile.preflight.conclusion import MAX_NAMED
from tpcompile.preflight.fact_judge import Judge
from tpcompile.preflight.facts import ENV, RankFacts, SetupDigest

Facts = Mapping[str, str]


def judged(
    *ranks: tuple[str, Facts], dead: frozenset[int] = frozenset(), allowed: Allowed = ()
) -> tuple[Verdict, list[int]]:
    """Verdict over ranks of (domain, environment facts), and the ranks that the judge asked."""
    facts = [RankFacts(groups={ENV: dict(values)}) for _, values in ranks]
    asked: list[int] = []

    def fetch(rank: int, question: dict[str, Any], kind: Any) -> Any | None:
        asked.append(rank)
        return None if rank in dead else facts[rank].part(question["group"])

    digests = [
        SetupDigest(rank=rank, domain=domain, shas={ENV: facts[rank].sha(ENV)})
        for rank, (domain, _) in enumerate(ranks)
    ]
    return Judge(digests, {}, fetch, 1.0, "preflight", allowed=allowed).verdict(), asked


@pytest.mark.parametrize("hidden", [False, True])
def test_many_declared_differences_do_not_hide_one_that_is_not(hidden: bool) -> None:
    ours, theirs = ({f"env TORCHINDUCTOR_LORA_{n:02}": rank for n in range(2 * MAX_NAMED)} for rank in "01")
    allowed = [("environment", "LORA", "adapters of each rank")]
    ours["env Z"], theirs["env Z"] = "same", "other" if hidden else "same"
    found, _ = judged(("tp", ours), ("tp", theirs), allowed=allowed)
    assert found.status == (Status.FAIL if hidden else Status.PASS)
    red = [d.title for d in found.divergences if d.is_red]
    assert len(red) == hidden and all(title.startswith("env Z") for title in red)


def test_a_rank_that_died_after_its_hash_came_is_not_needed_where_a_different_rank_has_the_same_hash() -> None:
    ranks = [
        ("tp 0-1", {"env A": "1"}),
        ("tp 0-1", {"env A": "1"}),
        ("tp 2-3", {"env A": "2"}),
        ("tp 2-3", {"env A": "2"}),
    ]
    found, asked = judged(*ranks, dead=frozenset({2}))
    assert found.status == Status.PASS and asked == [0, 2, 3]
    found, _ = judged(*ranks[:2], ("tp 2-3", {"env A": "2"}), ("tp 2-3", {"env A": "3"}), dead=frozenset({2}))
    assert found.status == Status.FAIL
    title = found.divergences[0].title
    assert "; rank 2 " in title and title.count("'sha256:") == 2
