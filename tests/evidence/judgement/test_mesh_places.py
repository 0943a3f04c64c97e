"""Where the ranks of a finding are in the mesh, and that a difference of several domains has the ranks of all."""

from __future__ import annotations

import itertools

import pytest

from tests.evidence import samples
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.judgement import leading
from tpcompile.evidence.judgement.mesh_places import place_text, with_same_elsewhere
from tpcompile.evidence.judgement.verdict import agree_rules, conclude
from tpcompile.evidence.records import Lead, RankRecord, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.replay import fetch_from

SIZES = {"pp": 2, "dp": 2, "tp": 4}


def mesh(**sizes: int) -> dict[int, dict[str, int]]:
    places = itertools.product(*map(range, sizes.values()))
    return {rank: dict(zip(sizes, place, strict=True)) for rank, place in enumerate(places)}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (range(8, 16), "all with pp = 1"),
        (range(1, 16, 4), "all with tp = 1"),
        ([9, 13], "all with pp = 1, tp = 1"),
        ([*range(2, 16, 4), *range(3, 16, 4)], "all with tp = 2-3"),
        ([13], "at pp 1, dp 1, tp 1"),
        (range(16), ""),
        ([1, 2], ""),
        ([1, 6], ""),
        ([], ""),
        ([3, 99], ""),
    ],
)
def test_ranks_that_follow_a_coordinate_are_named_by_it(ranks: list[int], text: str) -> None:
    assert place_text(sorted(ranks), mesh(**SIZES)) == text


def test_in_a_mesh_of_one_axis_the_number_of_the_rank_says_it() -> None:
    assert place_text([1], mesh(tp=4)) == place_text([1], mesh(dp=1, tp=4)) == place_text([1], {}) == ""


def judged(odd: set[int]) -> Verdict:
    """Ranks of a mesh of pp, dp and tp; the odd ones have another constant, and each stage has a graph of its own."""
    records: list[RankRecord] = []
    for rank, place in mesh(**SIZES).items():
        constant = samples.call("mul", "%0", "3" if rank in odd else "2")
        compile_ = samples.compiled(samples.call("add", "%0", str(place["pp"])), constant, samples.reduce("%1"))
        first = rank - place["tp"]
        records.append(
            samples.record(
                rank, compile_, world_size=16, domain=f"tp {first}-{first + 3}", coordinate=place["tp"],
                coordinates=place,
            )
        )  # fmt: skip
    digests = [digest_rank(record) for record in records]
    return conclude(agree_rules(timeout_s=1), digests, fetch_from(records), world_size=16)


def test_stages_that_differ_are_no_finding() -> None:
    assert judged(set()).exit_code == 0


def test_a_difference_of_all_domains_has_the_ranks_of_all_and_their_coordinate() -> None:
    lead = judged({1, 5, 9, 13}).lead
    assert lead is not None
    assert (lead.ranks, lead.is_rank_known) == ((1, 5, 9, 13), True)
    assert lead.place.endswith("with tp = 1")


def test_a_difference_of_one_stage_says_the_stage() -> None:
    verdict = judged({8, 9, 12, 13})
    assert verdict.lead is not None
    assert verdict.lead.ranks == tuple(range(8, 16)) and not verdict.lead.is_rank_known
    assert verdict.lead.place.endswith("with pp = 1") and verdict.lead.place in verdict.summary


def test_one_rank_has_its_coordinates_and_a_difference_of_no_coordinate_has_none() -> None:
    one, two = judged({6}).lead, judged({6, 8}).lead
    assert one is not None and two is not None
    assert (one.ranks, one.place) == ((6,), "at pp 0, dp 1, tp 2")
    assert (two.ranks, two.place) == ((6, 8), "")


def judged_in_pairs(odd: dict[int, str], **sizes: int) -> Verdict:
    """As `judged`, in a mesh whose groups of tp are pairs; the odd ranks have that constant, a stage its own graph."""
    records: list[RankRecord] = []
    for rank, place in mesh(**sizes, tp=2).items():
        constant = samples.call("mul", "%0", odd.get(rank, f"{2 + place['pp']}"))
        first = rank - place["tp"]
        records.append(
            samples.record(
                rank, samples.compiled(constant, samples.reduce("%1")), world_size=8, domain=f"tp {first}-{first + 1}",
                coordinate=place["tp"], coordinates=place,
            )
        )  # fmt: skip
    digests = [digest_rank(record) for record in records]
    return conclude(agree_rules(timeout_s=1), digests, fetch_from(records), world_size=8)


@pytest.mark.parametrize("rank", [4, 5])
@pytest.mark.parametrize("constant", ["9", "2"], ids=["of its own", "of a different stage"])
def test_a_rank_of_a_pair_is_named_by_the_replicas_of_its_stage(rank: int, constant: str) -> None:
    lead = judged_in_pairs({rank: constant}, pp=2, dp=2).lead
    assert lead is not None
    assert (lead.ranks, lead.is_rank_known, lead.place) == ((rank,), True, f"at pp 1, dp 0, tp {rank - 4}")


@pytest.mark.parametrize(
    ("odd", "sizes"),
    [
        ({5: "9"}, {"pp": 4, "dp": 1}),  # no replicas
        ({5: "9", 6: "9"}, {"pp": 2, "dp": 2}),  # nor any that agree
    ],
)
def test_without_a_replica_that_agrees_the_ranks_of_a_pair_only_differ(
    odd: dict[int, str], sizes: dict[str, int]
) -> None:
    lead = judged_in_pairs(odd, **sizes).lead
    assert lead is not None
    assert not lead.is_rank_known
    assert {4, 5} <= set(lead.ranks)


def lead_of(ranks: tuple[int, ...], **fields: object) -> Lead:
    return Lead.model_validate({"cause": Cause.RANK_CONSTANT, "says": "2 / 3", "ranks": ranks, **fields})


def test_domains_that_found_the_same_have_the_ranks_and_hosts_of_all() -> None:
    """What a domain says alone, and with others: those that found something else are left out."""
    own = lead_of((8, 9), hosts={"node-a": (8, 9)})
    alone = judged({8, 9}).model_copy(update={"lead": own, "summary": leading.summary(own)})
    others = [lead_of(tuple(range(10, 16)), hosts={"node-b": tuple(range(10, 16))}), lead_of((0,), says="2 / 4")]
    together = with_same_elsewhere(alone, own, others, mesh(**SIZES))
    assert together.lead is not None
    assert together.lead.ranks == tuple(range(8, 16)) and together.lead.place.endswith("with pp = 1")
    assert together.lead.hosts == {"node-a": (8, 9), "node-b": tuple(range(10, 16))}
    assert together.lead.place in together.summary
    nobody = with_same_elsewhere(alone, own, others[1:], mesh(**SIZES))
    assert nobody.lead is not None
    assert nobody.lead.ranks == (8, 9)
