"""Cases on forked ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.faults import run
from tests.faults.case import Case, load
from tests.forked import torchrun

load("planted", "healthy")


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_case` as it is, but for the start of its processes."""
    monkeypatch.setattr(run, "launch", launch_forked)


def launch_forked(
    case: Case, folder: Path, *, environ: Mapping[str, str], limit_s: float, options: Sequence[str] = ()
) -> dict[str, int | bool]:
    """Stands for `tests.faults.run.launch`."""
    folder.mkdir(parents=True)
    ended = torchrun(run.rank_command(case, folder, options), nproc=case.world_size, environ=environ, timeout_s=limit_s)
    (folder / "log.txt").write_text(ended.stdout + ended.stderr)
    return {"exit_code": ended.returncode, "timed_out": ended.returncode == 124}
