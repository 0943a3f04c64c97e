"""What the domains of a job tell each other when they end it, without processes: one store, and a log of each."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from tpcompile.errors import ExitCode
from tpcompile.evidence.judgement import leading
from tpcompile.evidence.records import Lead, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.ranks.store import RankStore
from tpcompile.sentinel.other_domains import OtherDomains
from tpcompile.sentinel.store_log import StoreLog

PLACES = {rank: {"pp": rank // 4, "dp": rank // 2 % 2, "tp": rank % 2} for rank in range(8)}


@pytest.fixture
def shared() -> dist.Store:
    return dist.HashStore()


def log_of(rank: int, shared: dist.Store) -> StoreLog:
    first = rank // 2 * 2
    store = RankStore(shared, rank=rank, world_size=8)
    return StoreLog(lambda: store, (first, first + 1), domain=f"tp {first}-{first + 1}", number=0)


def red(*ranks: int, says: str = "2 / 3") -> Verdict:
    lead = Lead(cause=Cause.RANK_CONSTANT, says=says, ranks=ranks, is_rank_known=False)
    return Verdict(
        status=Status.FAIL, exit_code=ExitCode.FAIL, world_size=8, summary=leading.summary(lead), lead=lead
    )  # fmt: skip


def together(shared: dist.Store, found: dict[int, Verdict]) -> dict[int, Lead | None]:
    """The lead of each domain, by the rank that judges it; all end the job at once."""
    leads: dict[int, Lead | None] = {}

    def judge(rank: int) -> None:
        leads[rank] = OtherDomains(log_of(rank, shared), lambda: PLACES).together(found[rank]).lead

    judges: list[Any] = [threading.Thread(target=judge, args=(rank,)) for rank in found]
    for thread in judges:
        thread.start()
    for thread in judges:
        thread.join()
    return leads


def test_domains_that_end_the_job_for_the_same_say_so_with_the_ranks_of_all(shared: dist.Store) -> None:
    leads = together(shared, {4: red(4, 5), 6: red(6, 7)})
    assert {rank: lead and lead.ranks for rank, lead in leads.items()} == {rank: (4, 5, 6, 7) for rank in (4, 6)}
    assert all(lead and lead.place.endswith("with pp = 1") for lead in leads.values())
    problem = log_of(0, shared).first_problem()  # what a domain reports that loses its connections to them
    assert problem is not None
    assert (problem.cause, problem.ranks, problem.observed) == (Cause.RANK_CONSTANT, (4, 5, 6, 7), "2 / 3")


def test_domains_with_different_findings_keep_their_own(shared: dist.Store) -> None:
    leads = together(shared, {0: red(0, 1), 4: red(4, 5, says="2 / 4")})
    assert {rank: lead and lead.ranks for rank, lead in leads.items()} == {0: (0, 1), 4: (4, 5)}


def test_one_domain_reports(shared: dist.Store) -> None:
    first, second = (OtherDomains(log_of(rank, shared), lambda: PLACES) for rank in (4, 6))
    assert first.claims_report() and not second.claims_report()
    first.say_reported("why")
    assert second.reported() == "why"


def test_a_finding_of_a_domain_on_one_node_has_its_host_where_the_job_has_others(
    shared: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StoreLog, "host_of", lambda self, rank: f"node-{rank // 4}")
    lead, own = together(shared, {4: red(4, 5)})[4], red(4, 5).lead
    assert lead and own and lead == own.model_copy(update={"place": lead.place})
    assert lead.place.endswith("with pp = 1, dp = 0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    lead = together(dist.HashStore(), {4: red(4, 5)})[4]
    assert lead is not None
    assert lead.hosts == {"node-1": (4, 5)}
