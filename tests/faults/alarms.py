"""What a healthy program left behind -> the alarms of its run; pure but for the files of the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.healthy.program import Draw, Program
from tests.faults.run import Ended

Found = dict[str, Any]
"""What `play` writes on a rank."""


def alarms(program: Program, draw: Draw, folder: Path, ended: Ended) -> list[str]:
    """Everything that makes the run an alarm."""
    ranks = found_by_rank(folder)
    raised = []
    if ended.is_hang:
        raised.append("the run did not end in time")
    raised += [f"exit code {code}" for code in ended.codes.values() if code]
    raised += [f"a verdict in {path}" for path in folder.glob("verdict_*/verdict.json")]
    missing = sorted(set(range(draw.nproc)).difference(ranks))
    raised += [f"no result of rank {rank}" for rank in missing]
    for rank, found in sorted(ranks.items()):
        raised += [f"rank {rank}: {text}" for text in _of_rank(found)]
    if not missing:
        raised += _compiles(program, ranks)
    return raised


def found_by_rank(folder: Path) -> dict[int, Found]:
    """Rank -> what it wrote, of the ranks that wrote it."""
    files = {int(path.stem.removeprefix("rank_")): path for path in folder.glob("rank_*.json")}
    return {rank: json.loads(path.read_text()) for rank, path in files.items()}


def _of_rank(found: Found) -> list[str]:
    stopped = [f"the sentinel stopped watching: {why}" for why in found["stopped_watching"]]
    return [*found["findings"], *stopped]


def _compiles(program: Program, ranks: Mapping[int, Found]) -> list[str]:
    """Ranks of a group that compiled different numbers of times, and programs that compile nothing and test nothing."""
    counts: dict[str, dict[int, int]] = {}
    for rank, found in sorted(ranks.items()):
        counts.setdefault(found["domain"], {})[rank] = found["compiles"]
    raised = []
    for domain, own in counts.items():
        different = set(own.values())
        if different == {0}:
            raised.append(f"nothing compiled on {domain}")
        elif len(different) > 1 and not program.compiles_differ:
            raised.append(f"compiles by rank {own}")
    return raised
