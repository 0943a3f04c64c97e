"""What an operator is: edits of a program, and what must be said of it; torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tpcompile.faults.generated.names import Route
from tpcompile.faults.generated.template import Edit


class Ends(StrEnum):
    """What becomes of the job without the tool."""

    RUNS = "runs"
    """It ends by itself: slow, or silently wrong."""
    HANGS = "hangs"
    CRASHES = "crashes"
    MAY_HANG = "may hang"
    """It depends on the program: on the collectives that follow, and on the backend."""


class Blame(StrEnum):
    """Whom the evidence can show to be at fault."""

    RANK = "rank"
    """One rank did what the others did not, and left evidence of it; two ranks are enough."""
    DIFFER = "differ"
    """The ranks differ; of two, neither is known to be wrong, of three or more the odd one is."""
    ALL = "all"
    """Each rank differs from each."""


class Trace(StrEnum):
    """What the logs of the compiler show of it."""

    SHOWS = "shows"
    ABSENT = "absent"
    """It is not in what was compiled."""


class Start(StrEnum):
    """When it acts."""

    FIRST_CALL = "first call"
    STEP = "step"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One kind of fault, or one healthy thing that looks like a fault."""

    name: str
    what: str
    """One line. Rank R is drawn."""
    edits: tuple[Edit, ...]
    """The first decides where the fault is: one of the places of its kind is drawn."""
    variants: tuple[tuple[Edit, ...], ...] = ()
    """Other ways to write the same; one of these or `edits` is drawn."""
    causes: frozenset[str] = frozenset()
    """Acceptable causes: names of `Cause` in lower case; empty for a healthy one."""
    tags: tuple[str, ...] = ()
    """Lines a person would accept besides those of the fault."""
    is_where_layers_are_called: bool = False
    """The line that calls the layers is accepted, too; it may be one of the library that the program uses."""
    has_line: bool = True
    """False where no line of the program is the cause: any is accepted."""
    blame: Blame = Blame.RANK
    trace: Trace = Trace.SHOWS
    ends: Ends = Ends.MAY_HANG
    start: Start = Start.FIRST_CALL
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the sentinel."""
    backends: tuple[str, ...] = ()
    """Backends under which it acts; empty for all."""
    not_asked: tuple[Route, ...] = ()
    """Routes that do not take it for healthy, by their own rules."""

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
