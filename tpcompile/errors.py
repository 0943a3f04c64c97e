"""The exceptions that tpcompile raises, and the exit code of each.

    TpCompileError                    3  our own bug, unless a subclass has its own code
    |-- DivergenceError               1  the ranks differ, or a check of the gate failed
    |-- FastPathError                 1  a fused kernel was called where, or with what, it cannot run
    |-- ConfigError                   2  the user's command line, YAML or module arguments
    |   `-- DirectoryTakenError       a run directory that already holds a run
    `-- PreflightError                4  this machine cannot run it: GPUs, compiler, disk, versions

The text of an error says what is wrong, the numbers, and what to do.
"""

import errno
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path

REFUSED_BY_MACHINE = frozenset({
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EPIPE, errno.EMFILE,
    errno.ENFILE, errno.ENOMEM, errno.ENAMETOOLONG,
})  # fmt: skip
"""`errno` of what the machine refuses: a full disk, a directory of a different user. No bug of ours."""


class ExitCode(IntEnum):
    """Exit status of `tpcompile` and of the gate; bare torchrun flattens every failure to 1."""

    PASS = 0
    FAIL = 1
    USAGE = 2
    BUG = 3
    ENVIRONMENT = 4
    NOTHING_COMPILED = 5
    INCOMPLETE = 6
    """`diagnose`: what was compiled agrees, but the logs are incomplete or the job ended badly."""
    TIMEOUT = 124
    INTERRUPTED = 130
    """Stopped by SIGINT, Ctrl-C: 128 + 2, as a shell reports it."""
    TERMINATED = 143
    """Stopped by SIGTERM: 128 + 15."""


class TpCompileError(Exception):
    """Base class; `exit_code` is what the process should end with."""

    exit_code: ExitCode = ExitCode.BUG


class DivergenceError(TpCompileError):
    """The ranks differ, or a check of the gate failed.

    text: what differs, one line.
    ranks: those to blame, where they are known.
    """

    exit_code = ExitCode.FAIL
    run_dir: Path | None = None
    """Directory of the evidence, if it was written."""

    def __init__(self, text: str = "", *, ranks: Sequence[int] = ()) -> None:
        super().__init__(text)
        self.ranks = tuple(ranks)


class FastPathError(TpCompileError):
    """A fused kernel was called on a shard without being TP-aware, or with arguments that it cannot take."""

    exit_code = ExitCode.FAIL


class ConfigError(TpCompileError):
    """A preset, key or number the user gave cannot be used."""

    exit_code = ExitCode.USAGE


class DirectoryTakenError(ConfigError):
    """The run directory already holds a run, whose verdict could be taken for the new one."""

    def __init__(self, path: object) -> None:
        super().__init__(f"{path} already holds a run; choose a different --run-dir or remove it")


class TargetRaised(ConfigError):
    """The program that the user gave raised, or torch as it compiled it: shown with the traceback of the exception."""

    def __init__(self, target: str, error: Exception) -> None:
        super().__init__(f"{target} raised {type(error).__name__}, above; it must run in eager and compile")


class PreflightError(TpCompileError):
    """The machine lacks what the run needs."""

    exit_code = ExitCode.ENVIRONMENT
