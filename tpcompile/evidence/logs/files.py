"""Folders -> the one TORCH_TRACE file of every rank, as plain text; unusable files are listed, two jobs are refused."""

from __future__ import annotations

import gzip
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tpcompile.errors import ConfigError
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records.bounds import MAX_RANKS
from tpcompile.evidence.records.reader import read_object
from tpcompile.evidence.shortened import shortened
from tpcompile.evidence.text.ranks import named_ranks

PACKED = ".gz"
MAX_BYTES = 1 << 32
"""Most bytes that one packed log may unpack to: no log has as many, but a few bytes can claim any number."""
_BLOCK_BYTES = 1 << 20
PATTERN = "dedicated_log_torch_trace_*.log*"
_NAME = re.compile(r"dedicated_log_torch_trace_rank_(?P<rank>[0-9]+)(?:_.*)?\.log(?:\.gz)?")
_ENDS = (".log", f".log{PACKED}")


@dataclass(frozen=True)
class LogFiles:
    """The file of every rank, and the files left out."""

    paths: ByRank[Path]
    left_out: tuple[str, ...]
    """One line for each path that is named like a log and is not one."""


def find_logs(folders: Sequence[Path], *, num_ranks: int = 0) -> LogFiles:
    """The log of every rank, below any of the folders, which may be logs themselves.

    Raises ConfigError for fewer than two ranks, unless the job is known to have had more: torch opens no log on a rank
    that compiles nothing. Raises it for two logs of one rank too: two jobs, or one that was restarted.
    """
    _check_one_run(folders)
    found: dict[int, dict[str, Path]] = {}
    left_out = []
    for path in _candidates(folders):
        rank, reason = _rank_of(path)
        if reason:
            left_out.append(f"{printable(path.name)} is left out: {reason}")
        else:
            found.setdefault(rank, {}).setdefault(os.path.realpath(path), path)
    paths = ByRank(found)
    _check_one_job(paths)
    is_known_job = bool(paths) and num_ranks > 1
    if len(paths) < 2 and not is_known_job:
        logs_found = f"only that of rank {paths.ranks[0]}" if paths else "none"
        raise ConfigError(
            f"need the trace logs of two ranks, found {logs_found} in {', '.join(map(printable, folders))}; "
            "run the job with TORCH_TRACE=DIR on every rank, which writes DIR/dedicated_log_torch_trace_rank_*.log; "
            "a rank that compiles nothing writes none: pass the number of ranks with --world-size N"
        )
    return LogFiles(paths.map(lambda files: min(files.values())), tuple(left_out))


def _check_one_run(folders: Sequence[Path]) -> None:
    """Raise ConfigError for run directories of `tpcompile run`, or their `trace`, that are of different runs."""
    run_of = {folder: job for folder in folders for job in _runs(folder)}
    if len(set(run_of.values())) > 1:
        says = ", ".join(f"{printable(folder)} of {shortened(job, at_most=60)}" for folder, job in run_of.items())
        raise ConfigError(f"these folders are of different runs: {says}; pass those of one")


def _runs(folder: Path) -> Iterator[str]:
    for place in (folder, folder.parent):
        for path in sorted(place.glob("watched/rank_*.json"))[:1]:
            with suppress(OSError, ConfigError):
                yield str(read_object(path).get("job", ""))


def _candidates(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        if folder.is_file():
            yield folder
        elif folder.is_dir():
            yield from sorted(folder.rglob(PATTERN))
        else:
            raise ConfigError(f"there is no {printable(folder)}")


def printable(text: object) -> str:
    """A path for the reader; bytes of a name that are not UTF-8 cannot be printed, nor written to a report."""
    return str(text).encode(errors="surrogateescape").decode(errors="backslashreplace")


def _rank_of(path: Path) -> tuple[int, str]:
    """The rank in a file's name, or in that of a link to it, and why the file is not its log; empty when it is."""
    match = _NAME.fullmatch(path.name)
    if match is None and not path.name.endswith(_ENDS):
        return -1, f"a log ends in {' or '.join(_ENDS)}: unpack or rename it"
    if match is None:
        return -1, "its name has no rank, torch opened it before init_process_group"
    number = match["rank"].lstrip("0") or "0"
    if len(number) > len(str(MAX_RANKS)) or int(number) >= MAX_RANKS:
        return -1, f"{shortened(number, at_most=20)} is not the rank of any job, which has at most {MAX_RANKS:,}"
    return int(number), _unusable(path)


def _unusable(path: Path) -> str:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return f"{error.strerror}"
    if stat.S_ISREG(mode):
        return ""
    kind = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
    return f"it is {kind}, not a file"


def _check_one_job(paths: ByRank[dict[str, Path]]) -> None:
    several = paths.where(lambda files: len(files) > 1)
    if not several:
        return
    shown = ", ".join(map(printable, sorted(several.first.values())[:3]))
    raise ConfigError(
        f"more than one log of {named_ranks(several.ranks)} ({shown}): two jobs, or one that was "
        "restarted; give the logs of one run only"
    )


@dataclass(frozen=True)
class PlainLogs:
    """The logs of a job as plain files."""

    paths: ByRank[Path]
    cut: frozenset[int] = frozenset()
    """Ranks whose packed log ends early or is damaged: what could be unpacked is there."""


@contextmanager
def unpacked(paths: ByRank[Path]) -> Iterator[PlainLogs]:
    """Plain logs; those that were packed are in a folder that is removed at the end. Raises ConfigError, OSError.

    A record is read again where a compile is parsed in full, so a packed log is unpacked once, to disk.
    """
    packed = paths.where(lambda path: path.suffix == PACKED)
    if not packed:
        yield PlainLogs(paths)
        return
    with tempfile.TemporaryDirectory(prefix="tpcompile-logs-") as folder:
        plain = {rank: Path(folder, f"{rank}.log") for rank in packed}
        cut = frozenset(rank for rank, path in packed.items() if not _unpack(path, plain[rank]))
        yield PlainLogs(ByRank({**paths, **plain}), cut)


def _unpack(packed: Path, plain: Path) -> bool:
    """False where the packed file ends early or is damaged."""
    num_bytes = 0
    with packed.open("rb") as source, gzip.GzipFile(fileobj=source) as file, plain.open("wb") as out:
        try:
            while block := file.read1(_BLOCK_BYTES):
                num_bytes += len(block)
                if num_bytes > MAX_BYTES:
                    raise ConfigError(f"{packed} unpacks to more than {MAX_BYTES:,} bytes; a log has fewer")
                out.write(block)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return False
    return True
