"""Cases on forked ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.faults import run
from tests.faults.case import load
from tests.forked import torchrun

load("planted", "healthy")


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sweep` as it is, but for the start of its processes."""
    monkeypatch.setattr(run, "finished", finished_forks)


def finished_forks(launches: Iterable[run.Launch], _: object) -> Iterator[tuple[run.Launch, run.Ended]]:
    """Stands for `tests.faults.run.finished`."""
    for launch in launches:
        launch.out.mkdir(parents=True)
        environ = run.environment(launch)
        ended = torchrun(launch.command, nproc=launch.world_size, environ=environ, timeout_s=launch.limit_s)
        (launch.out / "log.txt").write_text(ended.stdout + ended.stderr)
        yield launch, run.Ended(codes={0: ended.returncode}, is_hang=ended.returncode == 124, wall_s=0.0)
