"""What a case is: the fault it plants and what must be reported; torch-free."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.causes import Cause

PROGRAMS = "tpcompile.corpus.programs"


class Case(Frozen):
    """One planted fault, or one healthy program that a naive comparison would call divergent."""

    name: str
    what: str
    """One line: what is planted, on which rank and at which step."""
    program: str
    """`module:function` in `tpcompile.corpus.programs`."""
    cause: Cause | None
    """What must be named; None for a healthy program, which must stay green."""
    ranks: tuple[int, ...] = ()
    """Ranks that must be blamed; the fault is planted there."""
    marker: str = ""
    """Comment at the end of the line that must be blamed; empty where no line exists."""
    step: int = 0
    """Step at which the fault acts."""
    num_steps: int = 5
    world_size: int = 2
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the device mesh; empty for none."""
    env: dict[int, dict[str, str]] = {}
    """Rank -> environment variables that only this rank gets."""
    options: dict[str, Any] = {}
    """Options of `Sentinel`."""
    on_gpus: bool = True
    """False for a fault of gloo that NCCL does not have: the case then runs on CPUs also on a machine with GPUs."""
    threads: tuple[str, ...]
    """Public issues that it stands for, each with the symptom in a few words."""
    limit_s: float = 120.0
    """Seconds after which the case is a hang."""

    @property
    def source(self) -> Path:
        """The file its program is in."""
        module = f"{PROGRAMS}.{self.program.partition(':')[0]}"
        return source_of(module)

    def blamed_lines(self) -> list[int]:
        """Numbers of the lines that end in the marker; a sound case has one, or none without a marker."""
        if not self.marker:
            return []
        lines = self.source.read_text().splitlines()
        return [number for number, line in enumerate(lines, start=1) if line.endswith(self.marker)]


def source_of(module: str) -> Path:
    """File of a module of this package, found without importing it."""
    package = importlib.util.find_spec("tpcompile")
    assert package is not None and package.submodule_search_locations, "tpcompile is importable"
    relative = module.split(".")[1:]
    return Path(package.submodule_search_locations[0]).joinpath(*relative).with_suffix(".py")
