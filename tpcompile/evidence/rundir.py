"""A run directory <-> records: the only module that knows its file names; every write is atomic."""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from tpcompile import config
from tpcompile.config import JobConfig
from tpcompile.errors import ConfigError, DirectoryTakenError, PreflightError
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.records import SCHEMA_VERSION, Frozen, RankRecord, Verdict
from tpcompile.evidence.records.bounds import Rank, WorldSize
from tpcompile.evidence.records.reader import damaged, first_error, read_object, shown, validated
from tpcompile.evidence.text.ranks import is_among, ranks_in_name, ranks_text

_PROBE_BYTES = 65536
DEFAULT_PARENT = "runs"
"""Folder of runs that were given no directory."""
_OF_RANK = re.compile(r"rank_(\d{1,9})")
R = TypeVar("R", bound=Frozen)


def new_stamp() -> str:
    """`<UTC time>-<id>`: runs that begin in the same second are apart."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"


def new_name(kind: str, stamp: str = "") -> str:
    """`runs/<UTC time>-<kind>-<id>`, of a new stamp or the given one."""
    time, _, token = (stamp or new_stamp()).partition("-")
    return f"{DEFAULT_PARENT}/{time}-{kind}-{token}"


def free_number(path: Path | str) -> int:
    """The first number, from 1, whose `numbered` path holds no file of a run. Raises PreflightError if unseen."""
    number = 1
    while RunDir(numbered(path, number)).holds_anything():
        number += 1
    return number


def numbered(path: Path | str, number: int) -> Path:
    """The absolute path, from number 2 on with `-2` and so on behind it."""
    first = Path(os.path.abspath(path))
    return first if number == 1 else first.with_name(f"{first.name}-{number}")


class RankStatus(Frozen):
    """The last known activity of a rank; rewritten at every phase, so that it is there after a rank was killed."""

    rank: Rank
    world_size: WorldSize
    pid: Annotated[int, Field(ge=0, lt=1 << 31)]
    host: str
    namespace: str = ""
    """PID namespace of `pid`: host names are not unique."""
    phase: str
    state: str
    """`running`, `finished`, `failed` (an exception), `stopped` (by a signal) or `unwritten` (its record cannot be)."""
    error: str = ""


class RunDir:
    """One directory per run:

    run.json              command, time, machine, versions: the only file with a clock in it
    config.json           the resolved configuration
    verdict.json          the conclusion, written once: the first writer wins
    junit.xml             the same for CI
    rank_N/record.json    all evidence of rank N
    rank_N/manifest.json  kernels of its graphs, for `tpcompile fusion`, where Inductor made them
    rank_N/status.json    last known activity of rank N
    rank_N/traceback.txt  of the exception that ended rank N, where a sentinel watched
    streams/rank_N.json   what rank N did, with times, where a sentinel watched
    kept/rank_N.json      what a sentinel keeps of rank N while the job runs, for `tpcompile diagnose`
    logs/                 log lines per rank
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path | str) -> RunDir:
        """Make the directory, or raise PreflightError when it cannot be written."""
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            run.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise run._unusable(error) from None
        run.check_writable()
        return run

    @classmethod
    def create_new(cls, path: Path | str) -> RunDir:
        """The same. Raises DirectoryTakenError when it holds a run, whose verdict would be taken for this one's."""
        if cls(path).holds_run():
            raise DirectoryTakenError(path)
        return cls.create(path)

    def check_writable(self) -> None:
        """Raise PreflightError when the directory cannot take the files of a small run."""
        try:
            os.unlink(temporary(self.path, " " * _PROBE_BYTES))
        except OSError as error:
            raise self._unusable(error) from None

    def _unusable(self, error: OSError) -> PreflightError:
        return PreflightError(
            f"cannot write run directory {self.path}: {error.strerror}; choose a different one with --run-dir"
        )

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Open a finished or broken run, or raise ConfigError when there is none."""
        run = cls(path)
        if not run.path.is_dir():
            raise ConfigError(f"no run directory at {run.path}")
        return run

    @property
    def logs(self) -> Path:
        """Folder of log lines, one file per rank."""
        return self.path / "logs"

    @property
    def junit(self) -> Path:
        """JUnit XML of the verdict."""
        return self.path / "junit.xml"

    def write_run(self, facts: dict[str, Any]) -> None:
        """Write `run.json`: command, time, machine, versions."""
        self._write("run.json", json.dumps({"schema_version": SCHEMA_VERSION} | facts, sort_keys=True, indent=1))

    def read_run(self) -> dict[str, Any]:
        """Content of `run.json`, `{}` when there is none. Raises ConfigError when it is damaged."""
        try:
            return read_object(self.path / "run.json")
        except FileNotFoundError:
            return {}

    def write_config(self, text: str) -> None:
        """Write the resolved configuration, JSON text."""
        self._write("config.json", text)

    def read_config(self) -> JobConfig:
        """The resolved configuration of the run. Raises ConfigError when it is missing or damaged."""
        path = self.path / "config.json"
        try:
            return config.parsed(read_object(path))
        except FileNotFoundError:
            raise ConfigError(f"{self.path} has no config.json; it is not a run directory of the gate") from None
        except ValidationError as error:
            raise damaged(path, first_error(error)) from None

    def write_record(self, record: RankRecord) -> None:
        """Write all evidence of one rank."""
        self._write(f"rank_{record.rank}/record.json", record.to_json())

    def read_records(self, *, facts: type[Frozen] | None = None, beside: Sequence[RunDir] = ()) -> list[RankRecord]:
        """Evidence of all ranks that left any, by rank; `facts` is what the measured values of each must be, `beside`
        are the folders that other nodes have written of the run.

        Raises ConfigError on a file of a different schema or a damaged one, on two records of one rank, on records of
        different runs, and on such that contradict each other about which ranks must agree.
        """
        found: dict[int, tuple[Path, RankRecord]] = {}
        paths = [path for run in (self, *beside) for path in run.rank_files("record.json")]
        for path in paths:
            record = self._read(RankRecord, path)
            _check_whole(record, path)
            if facts is not None:
                validated(facts, record.facts, path)
            rank = record.rank
            first, _ = found.setdefault(rank, (path, record))
            if first != path:
                both = f"{first} and {path}"
                raise ConfigError(f"two records of rank {rank}: {both}; keep that of this run")
        _check_one_run(found)
        _check_domains(found)
        return [record for _, record in found.values()]

    def write_status(self, status: RankStatus) -> None:
        """Write the activity of a rank."""
        self._write(f"rank_{status.rank}/status.json", status.to_json())

    def write_start(self, rank: int, doing: str) -> None:
        """Write what a rank does before it has a status: no status, as the directory does not hold a run yet.

        For the progress alone: a directory that cannot be written is reported by what must be there.
        """
        with suppress(PreflightError):
            self.write_text(f"logs/start_{rank}.txt", doing)

    def read_start(self, rank: int) -> str:
        """What a rank last did before it had a status; empty where its process has not begun."""
        try:
            return (self.logs / f"start_{rank}.txt").read_text()
        except OSError:
            return ""

    def read_statuses(self) -> list[RankStatus]:
        """Last status of every rank that started, by rank."""
        return [self._read(RankStatus, path) for path in self.rank_files("status.json")]

    def write_verdict(self, verdict: Verdict) -> bool:
        """Write the verdict unless there is one already; True when this call wrote it."""
        path = self.path / "verdict.json"
        try:
            made = temporary(self.path, verdict.to_json(indent=1))
        except OSError as error:
            raise _unwritable(path, error) from None
        try:
            os.link(made, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise _unwritable(path, error) from None
        finally:
            os.unlink(made)
        return True

    def replace_verdict(self, verdict: Verdict) -> None:
        """Write what the launcher knows in addition, once all ranks have ended. Raises as `write_verdict`."""
        self._write("verdict.json", verdict.to_json(indent=1))

    def read_verdict(self) -> Verdict | None:
        """The verdict, None when the run ended without one."""
        try:
            return self._read(Verdict, self.path / "verdict.json")
        except FileNotFoundError:
            return None

    def write_text(self, name: str, text: str) -> Path:
        """Write one of the report files next to the verdict."""
        return self._write(name, text)

    def holds_run(self) -> bool:
        """True when a run wrote here before, finished or not."""
        return (self.path / "verdict.json").exists() or bool(self.rank_files("status.json"))

    def holds_anything(self) -> bool:
        """True when some file of a run is here, if only half of one. Raises PreflightError when that cannot be seen."""
        try:
            return bool([*self.path.glob("*.json"), *self.path.glob("rank_*/*")])
        except OSError as error:
            raise self._unusable(error) from None

    def rank_files(self, name: str) -> list[Path]:
        """The files of that name, by rank; of folders that are named like those of ranks."""
        numbers = {path: _OF_RANK.fullmatch(path.parent.name) for path in self.path.glob(f"rank_*/{name}")}
        by_rank = sorted((int(number[1]), path) for path, number in numbers.items() if number)
        return [path for _, path in by_rank]

    def _write(self, name: str, text: str) -> Path:
        """Write a file. Raises PreflightError when the disk is full or the folder is not writable."""
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary(path.parent, text), path)
        except OSError as error:
            raise _unwritable(path, error) from None
        return path

    @staticmethod
    def _read(model: type[R], path: Path) -> R:
        data = read_object(path)
        version = data.get("schema_version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            found = f"{path} has schema {shown(version)}"
            raise ConfigError(f"{found}, this tpcompile reads {SCHEMA_VERSION}; use the version that wrote it")
        missing = sorted(model.model_fields.keys() - data.keys())
        if missing:  # what this version wrote has every key
            raise damaged(path, f"it lacks {', '.join(missing)}")
        return validated(model, data, path)


def temporary(folder: Path, text: str) -> str:
    """A new file with that text, to be renamed: so a file is written whole or not at all. Raises OSError."""
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix=".", suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            os.unlink(file.name)
            raise
        os.fchmod(file.fileno(), 0o644)  # CI uploads what its user can read
        return file.name


def _check_whole(record: RankRecord, path: Path) -> None:
    """Raise ConfigError for a record that cannot be what its rank wrote."""
    if record.rank >= record.world_size:
        raise damaged(path, f"it is of rank {record.rank} of {record.world_size} ranks")
    num_graphs = sum(counters.graphs for counters in record.counters)
    if num_graphs and not record.compiles:
        raise damaged(path, f"it counts {num_graphs} graphs and holds no compile")


def _check_one_run(found: Mapping[int, tuple[Path, RankRecord]]) -> None:
    """Raise ConfigError for records of two runs, which say nothing about each other."""
    by_job = grouped(found.values(), lambda one: one[1].job)
    if len(by_job) > 1:
        first, other = ([path for path, _ in alike] for alike in list(by_job.values())[:2])
        names = " and ".join(map(repr, by_job))
        raise ConfigError(f"{first[0]} and {other[0]} are of different runs, {names}: pass the folders of one")


def _check_domains(found: Mapping[int, tuple[Path, RankRecord]]) -> None:
    """Raise ConfigError for a record of a rank that would be compared with other ranks than they say.

    A domain has its ranks in its name, `tp 0-3`; one without is that of all ranks. A rank that ended before it compiled
    anything may not have known its own.
    """
    compiled = sorted(rank for rank, (_, record) in found.items() if record.compiles)
    domains = grouped(compiled, lambda rank: found[rank][1].domain)
    for domain, ranks in sorted(domains.items(), key=lambda item: len(item[1])):
        place = ranks_in_name(domain)
        expected = [rank for rank in compiled if not place or is_among(rank, place)]
        if ranks != expected:
            path, _ = found[ranks[0]]
            says = f"its domain {domain!r} is that of ranks {ranks_text(ranks)}"
            raise damaged(path, f"{says}, and must be that of ranks {ranks_text(expected)}")


def _unwritable(path: Path, error: OSError) -> PreflightError:
    return PreflightError(f"cannot write {path}: {error.strerror}")
