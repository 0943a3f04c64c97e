"""A difference that was found -> the line of the program at which its ranks parted, or that set what differs.

Graphs, guards and inputs say what differs. Which line made it so is seen in what the ranks execute from their first
line on, and before Python 3.12 recording that costs several times the trace: some ranks are traced again for it, once
there is a difference.
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tpcompile.dryrun.forks import Forks
from tpcompile.dryrun.plan import Asked
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.conclude import with_branch
from tpcompile.recording.ring import flow_left, forget_ring

_NUM_RANKS = 3
"""Of which two are a majority."""


def with_executed_lines(verdict: Verdict, forks: Forks) -> Verdict:
    """The verdict, led by that line where one is known."""
    ranks = some_of_both_sides(verdict)
    if len(ranks) < 2:
        return verdict
    rings = {rank: secrets.token_hex(8) for rank in ranks}
    try:
        with TemporaryDirectory(prefix="tpcompile-") as folder:
            again = replace(forks, run_dir=RunDir.create(Path(folder)))
            for _ in again.run(ranks, lambda rank: Asked(ring=rings[rank])):
                pass
        found = {rank: flow_left(ring) for rank, ring in rings.items()}
    finally:
        for ring in rings.values():
            forget_ring(ring)
    flows = {rank: flow for rank, flow in found.items() if flow is not None}
    executed = {code.file for flow in flows.values() for code in flow.codes}
    before = {one.file for flow in flows.values() for one in flow.before}
    return with_branch(verdict, flows, executed | before)


def some_of_both_sides(verdict: Verdict) -> list[int]:
    """An odd rank, and the nearest of those with which it was compared, sorted; nothing where no program differs."""
    cause = verdict.lead.cause if verdict.lead is not None else None
    groups = next((one.groups for one in verdict.divergences if one.is_red and one.cause is cause), ())
    if len(groups) < 2:
        return []
    most, *odd = groups
    (rank, *_) = odd[0].ranks
    # The first rank of a job prints and saves: where others can be compared, that is no branch that counts.
    peers = sorted(most.ranks, key=lambda peer: (peer == 0, abs(peer - rank)))
    return sorted([rank, *peers[: _NUM_RANKS - 1]])
