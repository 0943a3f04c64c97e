"""A client of a framework, and the faults that its own code can be told to have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tpcompile.evidence.records.causes import Cause

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in the client, and what a reader of the verdict has to learn.

    Its lines in the program end in a comment `# fault: NAME`: any of them is right, for instance the branch that parts
    the ranks and the line that decides it.
    """

    name: str
    says: str
    """The fault in plain words."""
    reports: tuple[str, ...]
    """Public reports of the same mistake: OWNER/REPOSITORY#NUMBER."""
    rank: int
    """The rank that deviates."""
    causes: frozenset[Cause]
    """Causes that say what happened; more than one where a fault has several equally good names."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program that uses a framework as its users do."""

    name: str
    folder: str
    needs: str
    """Distribution that has to be installed; its version stands in the table."""
    faults: tuple[Fault, ...]
    num_ranks: int = 2

    @property
    def program(self) -> Path:
        """The program, which is called with the name of a fault or with nothing."""
        return FOLDER / self.folder / "program.py"

    def lines_of(self, fault: Fault) -> tuple[int, ...]:
        """Numbers of the lines of the program that are to blame for a fault."""
        marker = f"# fault: {fault.name}"
        source = self.program.read_text().splitlines()
        return tuple(number for number, line in enumerate(source, 1) if line.rstrip().endswith(marker))
