"""`tpcompile run -- COMMAND`: the command's own output and exit code, and a verdict at the end. Starts without torch.

Every Python of the job finds `autostart/site` first on its path, and starts the sentinel with its first process group.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError
from rich.console import Console

from tpcompile.errors import ConfigError, ExitCode, PreflightError, TpCompileError
from tpcompile.evidence.logs.diagnose import Question, diagnose
from tpcompile.evidence.records import Verdict
from tpcompile.evidence.records.base import at_text
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.process_tree import Outcome, run_tree
from tpcompile.report import show
from tpcompile.report.publish import write
from tpcompile.report.stdout import forgiving

WATCH = "TPCOMPILE_WATCH"
"""Set in every process of a watched job."""
SETTINGS = "TPCOMPILE_WATCH_SETTINGS"
_TRACE = "TORCH_TRACE"
_SITE = Path(__file__).parent / "autostart" / "site"
_ASK_S, _POLL_S = 8.0, 0.1
_AFTERWARDS_S = 300.0
_MAX_ALONE = 3
"""Recompiles of some ranks alone that are said of a job without a finding."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes of a shell for a command that is not there, and for one that cannot be run."""


class Settings(BaseModel):
    """How the ranks of a job are watched; in their environment as JSON."""

    run_dir: str
    policy: Literal["stop", "warn"] = "stop"
    follow: tuple[str, ...] = ()
    flow: bool | None = None

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings of this process."""
        return cls.model_validate_json(text)


class Watched(BaseModel):
    """What a rank wrote about itself."""

    compiles: int
    world_size: int
    has_ended: bool
    job: str = ""
    """Identity of the job, equal on all ranks."""
    gave_way: bool = False
    """The program has a sentinel of its own."""
    has_looked: bool = False
    """It was told that somebody ends the job, and has said what it knows."""
    findings: tuple[str, ...] = ()
    """Red findings after which the job went on, one line each."""


def watched_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes that it is watched."""
    return run_dir / "watched" / f"rank_{rank}.json"


def interrupted_file(run_dir: Path) -> Path:
    """What the launcher writes when somebody ends the job: ranks that wait in vain then say for whom."""
    return run_dir / "watched" / "interrupted"


def environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the job: its path, settings, and a folder for torch's logs unless it has one."""
    path = os.pathsep.join(filter(None, [str(_SITE), environ.get("PYTHONPATH", "")]))
    logs = environ.get(_TRACE) or str(Path(settings.run_dir) / "trace")
    return {**environ, "PYTHONPATH": path, WATCH: "1", SETTINGS: settings.model_dump_json(), _TRACE: logs}


def run_watched(command: Sequence[str], settings: Settings, console: Console, *, is_quiet: bool) -> int:
    """Run a job, print its verdict to `console` and return the job's own exit code, 130 after Ctrl-C.

    Raises ConfigError for a command that cannot be started.
    """
    run_dir = Path(settings.run_dir)
    environ = environment(settings, os.environ)
    try:
        outcome = run_tree(command, environ=environ, timeout_s=None, on_signal=lambda: _ask_why(RunDir(run_dir)))
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from None
    with forgiving():
        _say(outcome, RunDir(run_dir), Path(environ[_TRACE]), console, is_quiet=is_quiet)
    return 128 + outcome.signal if outcome.signal else outcome.exit_code


def _ask_why(run_dir: RunDir) -> None:
    """Have the ranks say what they wait for, before the signal ends them; for `_ASK_S` at most."""
    if not _ranks(run_dir.path):
        return
    with suppress(OSError):
        interrupted_file(run_dir.path).touch()
    ends_s = time.monotonic() + _ASK_S
    while time.monotonic() < ends_s and run_dir.read_verdict() is None:
        if all(one.has_looked or one.has_ended for one in _ranks(run_dir.path).values()):
            return
        time.sleep(_POLL_S)


def _say(outcome: Outcome, run_dir: RunDir, logs: Path, console: Console, *, is_quiet: bool) -> None:
    """The verdict of the sentinel, or of the logs where it came to none and the job ended badly."""
    run: Path | None = run_dir.path
    verdict, ranks = run_dir.read_verdict(), _ranks(run_dir.path)
    has_own = any(one.gave_way for one in ranks.values())
    ended_badly = bool(outcome.exit_code or outcome.signal)
    if verdict is None and ended_badly and not has_own:
        verdict, run = _diagnosed(logs, run_dir.path), None
        if verdict is not None:
            with suppress(PreflightError):  # `write` says it of the next file
                run_dir.write_verdict(verdict)
    if verdict is not None:
        show.show(verdict, console, run=run, command="run", amount="last" if is_quiet else "all")
        write(verdict, run_dir, console, os.environ)
        return
    text = "the program has a sentinel of its own" if has_own else _watched_text(ranks)
    if len({one.compiles for one in ranks.values()}) > 1 and not has_own:
        text = "; ".join([text, *_recompiled_alone(logs, ranks)])
    console.print(f"tpcompile run: {text}", markup=False, highlight=False, soft_wrap=True)


def _diagnosed(logs: Path, run_dir: Path) -> Verdict | None:
    """What torch's logs and the ranks' own files show of a job that ended badly; None where they show nothing."""
    of_logs = None
    with suppress(TpCompileError):
        of_logs = diagnose([logs], Question(ended_badly=True))
    if of_logs is not None and of_logs.exit_code == ExitCode.NOTHING_COMPILED:
        of_logs = None
    try:
        return with_kept([run_dir], of_logs)
    except TpCompileError:
        return of_logs


def holds_kept(folders: Sequence[Path]) -> bool:
    """True where a rank that a sentinel watched has kept something of itself."""
    return any(file for folder in folders for file in folder.glob("kept/rank_*.json"))


def with_kept(folders: Sequence[Path], of_logs: Verdict | None) -> Verdict | None:
    """The verdict of what ranks kept in these folders, or that of the logs; in a process that imports torch.

    Raises ConfigError for what cannot be read, PreflightError without torch where there are no logs either.
    """
    if not holds_kept(folders):
        return of_logs
    if importlib.machinery.PathFinder.find_spec("torch") is None:  # beside `tpcompile-reader`
        if of_logs is None:
            raise PreflightError(
                "what ranks kept is judged with torch, which is not installed here: pip install tpcompile"
            )
        return of_logs
    command = [sys.executable, "-m", "tpcompile.sentinel.afterwards", *map(str, folders)]
    given = of_logs.to_json() if of_logs is not None else ""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=_AFTERWARDS_S)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason"])[-1].removeprefix("error: ")
        raise ConfigError(why)
    return Verdict.model_validate_json(done.stdout)


def _recompiled_alone(logs: Path, ranks: Mapping[int, Watched]) -> list[str]:
    """What some ranks alone compiled again, as torch's logs give the reasons.

    The sentinel takes code without collectives that one rank alone compiles for a call of its own, such as an
    evaluation, unless the ranks issue a collective after it: then it is known that they went past one call.
    """
    try:
        causes = diagnose([logs], Question()).recompiles
    except TpCompileError:
        return []
    alone = [cause for cause in causes if len(cause.ranks) < len(ranks)]
    return [
        f"only {named_ranks(cause.ranks)} recompiled{at_text(cause.line)}: {cause.guard}"
        for cause in alone[:_MAX_ALONE]
    ]


def _watched_text(ranks: Mapping[int, Watched]) -> str:
    """What was watched of a job without a finding."""
    if not ranks:
        return "no rank was watched: none made a process group of two or more ranks"
    world_size = max(one.world_size for one in ranks.values())
    compiles = sorted({one.compiles for one in ranks.values()})
    left = tuple(sorted(rank for rank, one in ranks.items() if not one.has_ended))
    counts = f"{compiles[0]}" if len(compiles) == 1 else f"{compiles[0]} to {compiles[-1]}"
    found = list(dict.fromkeys(text for one in ranks.values() for text in one.findings))
    differs = f"rank divergence: {' | '.join(found)}" if found else "nothing differs that was compared"
    text = f"{len(ranks)} of {world_size} ranks watched, compiles on each: {counts}; {differs}"
    if left:
        text += f"; {named_ranks(left)} ended without a last comparison"
    return f"{text}; numbers: not compared"


def _ranks(run_dir: Path) -> dict[int, Watched]:
    found = {}
    for file in (run_dir / "watched").glob("rank_*.json"):
        try:
            found[int(file.stem.partition("_")[2])] = Watched.model_validate_json(file.read_text())
        except (OSError, ValueError, ValidationError):  # it ended while it wrote this
            continue
    return found
