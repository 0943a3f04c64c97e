"""An operator: edits that plant a fault in a program, and the verdicts that are right for it; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.faults.case import Trace
from tests.faults.drawn.template import Edit
from tests.faults.names import Route


class Blame(StrEnum):
    """The ranks that the evidence can show to be at fault."""

    RANK = "rank"
    """One rank did what no other rank did, and left evidence of it; shown even with two ranks."""
    DIFFER = "differ"
    """The ranks differ: with two ranks it is not known which is wrong, with three or more it is the minority."""
    ALL = "all"
    """Every rank differs from every other one."""


class Start(StrEnum):
    """When the fault acts."""

    FIRST_CALL = "first call"
    STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of fault, or a harmless difference that looks like one."""

    name: str
    what: str
    """One line; rank R is drawn from the seed."""
    edits: tuple[Edit, ...]
    """The first edit decides where the fault is: one of the places that it fits is drawn."""
    variants: tuple[tuple[Edit, ...], ...] = ()
    """Alternatives to `edits` that plant the same fault; one of all these is drawn."""
    causes: frozenset[str] = frozenset()
    """Acceptable causes: names of `Cause` in lower case; empty for a healthy operator."""
    tags: tuple[str, ...] = ()
    """Lines that are accepted besides those of the fault, by their tag."""
    is_where_layers_are_called: bool = False
    """The line that calls the layers is accepted as well, even in a library that the program uses."""
    has_line: bool = True
    """False where no line of the program is the cause: any line is accepted."""
    blame: Blame = Blame.RANK
    trace: Trace = Trace.SHOWS
    start: Start = Start.FIRST_CALL
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the sentinel."""
    backends: tuple[str, ...] = ()
    """Backends under which the fault acts; empty for all."""
    not_asked: tuple[Route, ...] = ()
    """Routes on which a healthy operator is not run, since their rules report it."""

    leaves_no_log: bool = False
    """Rank R compiles nothing, so torch opens no log there: diagnose names the rank without a log, and no line."""
    unseen: tuple[tuple[str, str], ...] = ()
    """(version of torch, program, or all where it is empty): a guard that torch does not ask there, so that it acts on
    nothing that is compiled."""

    @property
    def is_healthy(self) -> bool:
        """True for what must stay green."""
        return not self.causes


def causes(*names: str) -> frozenset[str]:
    """Acceptable causes."""
    return frozenset(names)
