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
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from tpcompile.evidence.records.causes import Cause
from tpcompile.gate.faults.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One planted fault, or one healthy program that a naive comparison would call divergent."""

    name: str
    what: str
    """One line: what is planted, on which rank and at which step."""
    program: Callable[[Any], None]
    cause: Cause | None
    """What must be named; None for a healthy program, which must stay green."""
    threads: tuple[str, ...] = ()
    """Public issues that it stands for, each with the symptom in a few words."""
    ranks: tuple[int, ...] = ()
    """Ranks on which the fault is planted."""
    named: tuple[int, ...] = ()
    """Ranks that must be named, where it cannot be known from outside which of them is wrong; empty for `ranks`."""
    marker: str = ""
    """Comment at the end of the line that must be blamed; empty where no line exists."""
    step: int = 0
    """Step at which the fault acts."""
    num_steps: int = 5
    world_size: int = 2
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the device mesh; empty for none."""
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank -> environment variables that only this rank gets, before Python starts there."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Sentinel`."""
    on_gpus: bool = True
    """False for a fault of gloo that NCCL does not have: the case then runs on CPUs also on a machine with GPUs."""
    limit_s: float = 120.0
    """Seconds after which the case is a hang."""
    is_drawn: ClassVar[bool] = False
    """True for a program with parameters to draw, which `scripts/faults.py run` runs only when it is named."""

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks that must be blamed."""
        return self.named or self.ranks

    @property
    def source(self) -> Path:
        """The file its program is in."""
        return Path(inspect.getfile(self.program))

    def blamed_lines(self) -> list[int]:
        """Numbers of the lines that end in the marker; none without a marker."""
        if not self.marker:
            return []
        lines = self.source.read_text().splitlines()
        return [number for number, line in enumerate(lines, start=1) if line.endswith(self.marker)]


CASES: Registry[Case] = Registry("case", see="see `scripts/faults.py list`")


def fault(cause: Cause, *threads: str, ranks: tuple[int, ...] = (1,), **fields: Any) -> Callable[[F], F]:
    """Declare a program whose `ranks` diverge; `threads` and `fields` are those of `Case`."""
    return _declared(cause=cause, threads=threads, ranks=ranks, **fields)


def healthy(*threads: str, **fields: Any) -> Callable[[F], F]:
    """Declare a program that must stay green; `threads` and `fields` are those of `Case`."""
    return _declared(cause=None, threads=threads, **fields)


def _declared(**fields: Any) -> Callable[[F], F]:
    def declare(program: F) -> F:
        add(Case(program=program, **(described(program) | fields)))
        return program

    return declare


def described(program: Callable[..., Any]) -> dict[str, Any]:
    """Name and description of a case, by its program."""
    return {"name": program.__name__, "what": (program.__doc__ or "").partition("\n")[0]}


def add(case: Case) -> None:
    """Register a case. Raises ValueError when its name is taken or no line of its program ends in its marker."""
    if case.marker and not case.blamed_lines():
        raise ValueError(f"case {case.name!r}: no line of {case.source} ends in {case.marker!r}")
    CASES.add(case)


def load(*packages: str) -> Registry[Case]:
    """All cases of these packages of `tests.faults`, whose modules are imported."""
    for package in packages:
        found = importlib.import_module(f"tests.faults.{package}")
        for module in pkgutil.iter_modules(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)
    return CASES


def chosen(names: Iterable[str]) -> list[Case]:
    """The named cases, all planted ones for none. Raises ConfigError for an unknown name."""
    every = load("planted", "healthy")
    return [every.find(name) for name in dict.fromkeys(names)] or [case for case in every.values() if not case.is_drawn]
