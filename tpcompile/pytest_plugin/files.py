"""The files of a job, through which the ranks, their server and pytest communicate."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the server forks ranks for."""

    folder: str
    world_size: int
    target: str
    """`module:function` that each rank calls with the job, its rank, and the variables that torchrun would set."""
    arguments: dict[str, Any]
    """Of the target."""
    environ: dict[str, str]
    cwd: str
    sys_path: tuple[str, ...]
    timeout_s: float
    is_swept: bool = True
    """Processes that a rank leaves in its group are killed."""

    @classmethod
    def read(cls, folder: str) -> Job:
        """The job of a folder."""
        fields = json.loads(Path(folder, "job.json").read_text())
        return cls(**fields | {"sys_path": tuple(fields["sys_path"])})

    def write(self) -> None:
        """Write the job into its folder."""
        Path(self.folder, "job.json").write_text(json.dumps(asdict(self)))

    def exit_codes(self) -> list[int | None]:
        """By rank, negative for a signal, None for a rank that has not ended."""
        return [self.files.exit_code(rank) for rank in range(self.world_size)]

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
    """By their names in `config.option`."""
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

    def stop(self, rank: int) -> Path:
        """Made by pytest: the rank writes its stack and is killed."""
        return self.folder / f"stop_{rank}"

    def exit(self, rank: int) -> Path:
        """Exit code of a rank, negative for a signal."""
        return self.folder / f"exit_{rank}"

    def exit_code(self, rank: int) -> int | None:
        """What is in that file; None without it."""
        text = read_text(self.exit(rank))
        return int(text) if text else None

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
    """What is in a file of a job; empty for a file that is not there."""
    return path.read_text(errors="replace") if path.exists() else ""


@dataclass(frozen=True)
class Place:
    """A rank of a job."""

    job: Job
    rank: int


RANK = pytest.StashKey[Place]()
"""In the stash of the configuration of a rank's session."""
SHOW_STACK = signal.SIGUSR1
"""Makes a rank write its stack."""
STREAMS = ("stdout", "stderr")
ERROR = "error"
"""Key of a line with the reason why a rank could not run its test."""
IS_LOST_PEER = "tp_is_lost_peer"
"""Field of a report: the exception is one of communication, as after the end of another process."""
RUN_DIR = "tp_run_dir"
"""Field of a report: where the evidence of a divergence is."""
