"""A job of ranks, and its files, through which the ranks and pytest communicate."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ENVIRON = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
"""Variables for ranks, which share the cores; those of the session itself come first."""
if Path("/sys/class/net/lo").exists():
    ENVIRON["GLOO_SOCKET_IFNAME"] = "lo"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the server forks ranks for; it is pickled."""

    folder: str
    world_size: int
    target: str
    """`module:function` that each rank calls with the job, its rank, and the variables that torchrun would set."""
    arguments: Any
    """What the target reads of the job."""
    timeout_s: float
    environ: dict[str, str] = field(default_factory=lambda: {**ENVIRON, **os.environ})
    cwd: str = field(default_factory=os.getcwd)
    sys_path: list[str] = field(default_factory=lambda: list(sys.path))
    is_swept: bool = True
    """Kill the processes that a rank leaves in its group."""

    @property
    def files(self) -> Files:
        """The files of the job."""
        return Files(Path(self.folder))


@dataclass(frozen=True, kw_only=True)
class TestRun:
    """Arguments of a rank that runs a test: those of its pytest session."""

    nodeid: str
    args: tuple[str, ...]
    options: dict[str, Any]
    """Options of pytest, by their names in `config.option`."""
    workerinput: dict[str, Any]


@dataclass(frozen=True)
class Files:
    """Names of files in the folder of a job."""

    folder: Path

    @property
    def go(self) -> Path:
        """Made by pytest when no rank runs the body of the test any more: the ranks tear their fixtures down."""
        return self.folder / "go"

    @property
    def stopped_by_sentinel(self) -> Path:
        """Run directory of a sentinel that ended the ranks."""
        return self.folder / "stopped"

    def reports(self, rank: int) -> Path:
        """Reports of a rank, one JSON object a line."""
        return self.folder / f"reports_{rank}.jsonl"

    def stack(self, rank: int) -> Path:
        """Stack of a rank that was stopped, innermost frame first."""
        return self.folder / f"stack_{rank}.txt"

    def output(self, rank: int, stream: str) -> Path:
        """What a rank wrote to `stdout` or `stderr`."""
        return self.folder / f"rank_{rank}.{stream}"


def read_text(path: Path) -> str:
    """The text of a file of a job; empty for a file that is not there."""
    return path.read_text(errors="replace") if path.exists() else ""


@dataclass(frozen=True)
class Place:
    """A rank of a job."""

    job: Job
    rank: int


RANK = pytest.StashKey[Place]()
"""Key in the stash of a rank's session: which rank it is."""
SHOW_STACK = signal.SIGUSR1
"""Makes a rank write its stack."""
STREAMS = ("stdout", "stderr")
ERROR = "error"
"""Key of a line with the reason why a rank could not run its test."""
IS_LOST_PEER = "tp_is_lost_peer"
"""Field of a report: the exception is one of communication, as after the end of a different process."""
RUN_DIR = "tp_run_dir"
"""Field of a report: where the evidence of a divergence is."""
