"""A case run without the sentinel -> what tlparse, TORCH_DISTRIBUTED_DEBUG=DETAIL and spmd_check report."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

LIMIT_S = 40.0
"""Seconds a case may run without the sentinel before it counts as a hang."""


class Report(StrEnum):
    """What a tool reports on a case."""

    NAMED = "named"
    """The tool names the op, guard or line in which the ranks differ."""
    DETECTED = "detected"
    """The tool reports that ranks differ, but not in what."""
    SILENT = "silent"
    HANG = "hang"
    """The tool reported nothing, and the job did not end."""
    NOT_HERE = "not here"
    """The tool is not installed, or not part of this version of torch."""


@dataclass(frozen=True)
class Column:
    """One tool: whether it is installed, how to enable it, and how to read its output."""

    is_here: Callable[[], bool]
    environ: Callable[[Path], Mapping[str, str]]
    options: tuple[str, ...]
    read: Callable[[Path], Report]


def text_of(report: Report, *, timed_out: bool) -> str:
    """The cell of the matrix; a tool can report and still let the job hang."""
    if not timed_out:
        return report.value
    return Report.HANG.value if report == Report.SILENT else f"{report.value}, {Report.HANG.value}"


def read_tlparse(folder: Path) -> Report:
    """The landing page warns of compile ids, caches and collectives; it never names the guard, op or line."""
    command = ["tlparse", "--all-ranks-html", "--no-browser", "-o", str(folder / "tlparse"), str(folder / "trace")]
    subprocess.run(command, capture_output=True, timeout=120, check=False)
    page = folder / "tlparse" / "index.html"
    if not page.exists():
        return Report.SILENT
    return Report.DETECTED if _TLPARSE.search(page.read_text(errors="replace")) else Report.SILENT


def read_detail(folder: Path) -> Report:
    """The wrapper's error names both collectives; a failed barrier only says that some rank is missing."""
    log = _log(folder)
    if _DETAIL_NAMES.search(log):
        return Report.NAMED
    return Report.DETECTED if _DETAIL_FAILS.search(log) else Report.SILENT


def read_spmd_check(folder: Path) -> Report:
    """The report of spmd_check lists the nodes that differ."""
    return Report.NAMED if _SPMD.search(_log(folder)) else Report.SILENT


def _log(folder: Path) -> str:
    return (folder / "log.txt").read_text(errors="replace")


def _has_spmd_check() -> bool:
    major, minor = metadata.version("torch").split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


_TLPARSE = re.compile(r"[Dd]iverging|[Dd]ivergent|mismatch")
_DETAIL_NAMES = re.compile(r"Detected mismatch between collectives on ranks")
_DETAIL_FAILS = re.compile(r"monitoredBarrier|failed to pass", re.IGNORECASE)
_SPMD = re.compile(r"SPMD GRAPH MISMATCH|SPMD graph verification failed")
_INDUCTOR = ("--backend", "inductor")

COLUMNS = {
    "tlparse": Column(
        lambda: shutil.which("tlparse") is not None,
        lambda f: {"TORCH_TRACE": str(f / "trace")},
        _INDUCTOR,
        read_tlparse,
    ),
    "detail": Column(lambda: True, lambda _: {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, (), read_detail),
    "spmd_check": Column(_has_spmd_check, lambda _: {}, (*_INDUCTOR, "--spmd-check"), read_spmd_check),
}
"""Name on the command line -> tool."""
