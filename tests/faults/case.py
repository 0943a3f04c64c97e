"""A program -> the case that it stands for: what is planted in it and what must be reported.

    @fault(Cause.STRIDE, "pytorch#155558: ...", marker="# blamed: input of the block", step=2)
    def stride(context: Context) -> None:
        '''Rank 1 gets the same batch in a different memory layout at step 2.'''

The name of the function is the case's, its docstring says what is planted.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tests.faults.registry import Registry
from tpcompile.evidence.records.causes import Cause

F = TypeVar("F", bound=Callable[..., Any])


class Trace(StrEnum):
    """Whether the logs of the compiler show the fault."""

    SHOWS = "shows"
    ABSENT = "absent"
    """Nothing that was compiled differs."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The verdicts that are right for a case."""

    causes: frozenset[str]
    """Acceptable names of the cause, in lower case; empty for a healthy program, which must stay green."""
    ranks: tuple[frozenset[int], ...]
    """Acceptable sets of blamed ranks."""
    is_majority_needed: bool = False
    """The odd ranks of a finding count, not all of its ranks where no group of equal ones has a majority."""
    source: str = ""
    """End of the path of the program."""
    lines: tuple[int, ...] | None = None
    """Acceptable lines of the program; None where any is."""
    file: str = ""
    """Name of a file of which any line is accepted; empty for none."""
    trace: Trace = Trace.SHOWS
    without_log: tuple[int, ...] = ()
    """Ranks that compile nothing, for which torch opens no log: `diagnose` names them by that, and no line."""

    @property
    def is_healthy(self) -> bool:
        """True for what must stay green."""
        return not self.causes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program to run on ranks, and the verdicts that are right for it, in `truth` of a subclass."""

    name: str
    """Unique among all that run beside it."""
    what: str
    """One line: what is planted, on which rank and at which step."""
    world_size: int = 2
    step: int = 0
    """Step at which the fault acts."""
    num_steps: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Sentinel`."""
    limit_s: float = 120.0
    """Seconds after which the case is a hang."""
    is_drawn: ClassVar[bool] = False
    """True for a program with parameters to draw, which `scripts/faults.py run` runs only when it is named."""


@dataclass(frozen=True, kw_only=True)
class Planted(Case):
    """A function with one planted fault, or a healthy one that a naive comparison would call divergent."""

    program: Callable[[Any], None]
    cause: Cause | None
    """What must be named; None for a healthy program."""
    threads: tuple[str, ...] = ()
    """Public issues that it stands for, each with the symptom in a few words."""
    ranks: tuple[int, ...] = ()
    """Ranks on which the fault is planted."""
    named: tuple[int, ...] = ()
    """Ranks that must be named, where it cannot be known from outside which of them is wrong; empty for `ranks`."""
    marker: str = ""
    """Comment at the end of the line that must be blamed; empty where no line exists."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the device mesh; empty for none."""
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank -> environment variables that only this rank gets, before Python starts there."""
    on_gpus: bool = True
    """False for a fault of gloo that NCCL does not have: the case then runs on CPUs also on a machine with GPUs."""

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks that must be blamed."""
        return self.named or self.ranks

    @property
    def source(self) -> Path:
        """The file its program is in."""
        return Path(inspect.getfile(self.program))

    @property
    def truth(self) -> Truth:
        """The one verdict that is right."""
        return Truth(
            causes=frozenset({self.cause.name.lower()} if self.cause else ()),
            ranks=(frozenset(self.blamed),),
            is_majority_needed=True,
            source=f"{self.source.parent.name}/{self.source.name}",
            lines=tuple(self.blamed_lines()) if self.marker else None,
        )

    def command(self, folder: Path, *options: str) -> tuple[str, ...]:
        """Arguments of Python for a rank; `options` are those of rank.py."""
        module = self.program.__module__
        return ("-m", "tests.faults.rank", module, self.name, "--run-dir", str(folder), *options)

    def blamed_lines(self) -> list[int]:
        """Numbers of the lines that end in the marker; none without a marker."""
        if not self.marker:
            return []
        lines = self.source.read_text().splitlines()
        return [number for number, line in enumerate(lines, start=1) if line.endswith(self.marker)]


CASES: Registry[Planted] = Registry("case", see="see `scripts/faults.py list`")


def fault(cause: Cause, *threads: str, ranks: tuple[int, ...] = (1,), **fields: Any) -> Callable[[F], F]:
    """Declare a program whose `ranks` diverge; `threads` and `fields` are those of `Planted`."""
    return _declared(cause=cause, threads=threads, ranks=ranks, **fields)


def healthy(*threads: str, **fields: Any) -> Callable[[F], F]:
    """Declare a program that must stay green; `threads` and `fields` are those of `Planted`."""
    return _declared(cause=None, threads=threads, **fields)


def _declared(**fields: Any) -> Callable[[F], F]:
    def declare(program: F) -> F:
        add(Planted(program=program, **(described(program) | fields)))
        return program

    return declare


def described(program: Callable[..., Any]) -> dict[str, Any]:
    """Name and description of a case, by its program."""
    return {"name": program.__name__, "what": (program.__doc__ or "").partition("\n")[0]}


def add(case: Planted) -> None:
    """Register a case. Raises ValueError when its name is taken or no line of its program ends in its marker."""
    if case.marker and not case.blamed_lines():
        raise ValueError(f"case {case.name!r}: no line of {case.source} ends in {case.marker!r}")
    CASES.add(case)


def load(*packages: str) -> Registry[Planted]:
    """All cases of these packages of `tests.faults`, whose modules are imported."""
    for package in packages:
        found = importlib.import_module(f"tests.faults.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)
    return CASES


def chosen(names: Iterable[str]) -> list[Planted]:
    """The named cases, all planted ones for none. Raises ConfigError for an unknown name."""
    every = load("planted", "healthy")
    return [every.find(name) for name in dict.fromkeys(names)] or [case for case in every.values() if not case.is_drawn]
