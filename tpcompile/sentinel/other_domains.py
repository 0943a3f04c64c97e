"""What this domain ends the job for -> the same with the ranks of all domains that find it, and one report of it.

The domains of a job compare their ranks apart. A fault of the program is in many of them at once, and each that ends
takes from others the connections that they wait in: what these see first is only that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tpcompile.evidence.judgement.mesh_places import Coordinates, with_same_elsewhere
from tpcompile.evidence.records import Check, CheckId, Frozen, Lead, Status, Verdict
from tpcompile.node import has_other_nodes
from tpcompile.sentinel.store_log import StoreLog

_TOGETHER_S = 1.5
"""Domains that run the same program find the same fault within this time, of one step."""
_REPORTED_S = 5.0


class _Found(Frozen):
    """What a domain ends the job for."""

    lead: Lead


class OtherDomains:
    """The other domains of the job, for the rank that judges this one."""

    def __init__(self, log: StoreLog, places: Callable[[], Coordinates]) -> None:
        self._log, self._places = log, places

    @property
    def exist(self) -> bool:
        """False where all ranks of the job are compared."""
        return len(self._log.members) < self._log.world_size

    def together(self, verdict: Verdict) -> Verdict:
        """Publish why this domain ends the job; the verdict, with the ranks of others that do so for the same."""
        if verdict.lead is None:
            return verdict
        lead = verdict.lead.model_copy(update={"hosts": self._hosts(verdict.lead)})
        board = self._log.board(3)
        board.put(f"found/{board.count('found')}", _Found(lead=lead).model_dump(mode="json"))
        is_known = self._log.first_problem() is not None
        if not is_known:
            time.sleep(_TOGETHER_S)
        keys = {number: f"found/{number}" for number in range(1, board.count("found", 0) + 1)}
        found, _ = self._log.board(len(keys)).gather(keys, _Found, timeout_s=0.0)
        merged = with_same_elsewhere(verdict, lead, [one.lead for one in found.values()], self._places())
        assert merged.lead is not None
        self._log.say_problem(_problem(merged.lead))
        return merged

    def _hosts(self, lead: Lead) -> dict[str, tuple[int, ...]]:
        """Hosts of the ranks of a finding, where the job has others."""
        if lead.hosts or not has_other_nodes():
            return lead.hosts
        found: dict[str, tuple[int, ...]] = {}
        for rank in lead.ranks:
            host = self._log.host_of(rank)
            found[host] = (*found.get(host, ()), rank)
        return {host: ranks for host, ranks in found.items() if host}

    def claims_report(self) -> bool:
        """True for the first domain that reports."""
        return self._log.board(1).count("reports") == 1

    def say_reported(self, summary: str) -> None:
        """Publish what the report of the job says."""
        self._log.board(1).put("reported", summary)

    def reported(self) -> str:
        """What the report of a different domain says, once it is written; empty where it does not come in time."""
        return str(self._log.board(2).get("reported", str, timeout_s=_REPORTED_S) or "")


def _problem(lead: Lead) -> Check:
    """The failed check of a domain that ends since a different one does."""
    return Check(
        id=CheckId.MOVING,
        status=Status.FAIL,
        expected="every wait can end",
        observed=lead.says,
        line=lead.line,
        ranks=lead.ranks,
        is_rank_known=lead.is_rank_known,
        left_out=lead.left_out,
        cause=lead.cause,
        advice=lead.do_first,
    )
