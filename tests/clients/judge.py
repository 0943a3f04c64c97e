"""A fault and the verdict on it -> found, and whether rank, cause and line are right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.clients.case import Client, Fault
from tests.clients.launch import Outcome
from tpcompile.evidence.records import Lead


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    client: str
    fault: str
    """Empty for a healthy run."""
    route: str
    exit_code: int
    timed_out: bool
    found: bool
    """The job ended by itself, with exit code 1 and a red verdict."""
    rank: bool | None
    """The rank that deviates is named, or both of two are shown; None for a healthy run, as for cause and line."""
    cause: bool | None
    line: bool | None
    says: str
    """The first finding: cause, ranks, line."""
    wall_s: float
    """Of the whole run, with imports and compiles."""

    @property
    def is_right(self) -> bool:
        """Everything that a reader needs is right."""
        return self.found and bool(self.rank and self.cause and self.line)


def judged(client: Client, fault: Fault | None, route: str, outcome: Outcome) -> Row:
    """Judge the finding that a reader sees first."""
    verdict = outcome.verdict
    lead = verdict.lead if verdict is not None else None
    rank = cause = line = None
    if fault is not None:
        rank = lead is not None and _is_rank_right(client, fault, lead)
        cause = lead is not None and lead.cause in fault.causes
        line = lead is not None and _is_line_right(client, fault, lead)
    return Row(
        client=client.name,
        fault=fault.name if fault else "",
        route=route,
        exit_code=outcome.exit_code,
        timed_out=outcome.timed_out,
        found=lead is not None and outcome.exit_code == 1 and not outcome.timed_out,
        rank=rank,
        cause=cause,
        line=line,
        says=_says(lead),
        wall_s=round(outcome.wall_s, 1),
    )


def _is_rank_right(client: Client, fault: Fault, lead: Lead) -> bool:
    """With two ranks and no majority, both sides may be shown: then nobody is blamed."""
    shows_both = client.num_ranks == 2 and not lead.is_rank_known and set(lead.ranks) == {0, 1}
    return shows_both or lead.ranks == (fault.rank,)


def _is_line_right(client: Client, fault: Fault, lead: Lead) -> bool:
    if lead.line is None:
        return False
    is_in_program = lead.line.file.endswith(f"clients/{client.folder}/{client.program.name}")
    return is_in_program and lead.line.line in client.lines_of(fault)


def _says(lead: Lead | None) -> str:
    if lead is None:
        return ""
    ranks = ", ".join(map(str, lead.ranks)) or "none"
    ranks_text = f"ranks {ranks}" if lead.is_rank_known else f"ranks {ranks} differ"
    line = f"{Path(lead.line.file).name}:{lead.line.line}" if lead.line else "no line"
    return f"{lead.cause.value}; {ranks_text}; {line}"
