"""One compile of one rank as its log has it, without its text."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from tpcompile.evidence.compiles.contradictions import Damage
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text import normalise

_FATAL = (
    "BackendCompilerFailed",
    "InternalTorchDynamoError",
    "InductorError",
    "LoweringException",
    "TorchRuntimeError",
)


class Frame(NamedTuple):
    """A compiled frame; the same on all ranks, wherever the code is installed."""

    function: str = ""
    path: str = ""
    """The last two parts of the path of its file."""
    line: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"{self.function} {self.path}:{self.line}"
        return self.function or "?"


@dataclass(slots=True)
class LoggedCompile:
    """One compile of one rank, without its text."""

    compile_id: str
    start_before: int | None = None
    """Place of the last `dynamo_start` of the same frame before this compile."""
    places: array[int] = field(default_factory=lambda: array("Q"))
    start: int | None = None
    """Place of its `dynamo_start`; None for a call that only exceeded the recompile limit."""
    function: str = ""
    line: UserLine | None = None
    frame: Frame = field(default_factory=Frame)
    size_bytes: int = 0
    """Text a full parse has to read."""
    names: frozenset[str] = frozenset()
    groups: dict[str, int] = field(default_factory=dict)
    """Process groups its graphs name, as torch names them -> place in order of appearance."""
    alone: set[str] = field(default_factory=set)
    """The groups that have one rank, where the text shows it."""
    issued: list[tuple[str, str]] = field(default_factory=list)
    """(op, group) of the collectives in its graphs, in the order of the text; waits are left out."""
    schedules: list[tuple[str, ...]] = field(default_factory=list)
    """What Inductor scheduled: the kernels of collectives in order, forward before backward."""
    fail_type: str = ""
    """Type of the error, when the compile failed."""
    fail_text: str = ""
    """First line of the error."""
    lowered: tuple[str, ...] = ()
    """Names of its records of lowered graphs, generated code and schedules, sorted, one for each."""
    program: bytes = b""
    """Hash of the last graph that Dynamo traced, without numbers: ranks with equal ones lower the same ops."""
    says_how_lowered: bool = False
    """Its metrics say whether Inductor generated code, and the rest of the log agrees."""
    damage: Damage | None = None
    """Why it cannot be relied on, and is not compared; None for a compile whose records are whole and agree."""
    began: bytes = b""
    """Time of its first record as torch writes it, `MMDD hh:mm:ss.ffffff`."""
    ended: bytes = b""
    """Time of its last record."""
    sha: str = ""
    """Hash of the whole text, without what differs by nature and without names of groups."""

    @property
    def is_ended(self) -> bool:
        """True when torch logged the end of the compile."""
        return "compilation_metrics" in self.names

    @property
    def error(self) -> str:
        """Type and first line of the error of a compile that failed."""
        return f"{self.fail_type}: {self.fail_text}"

    @property
    def failed(self) -> str:
        """Function, type and first line of the error of a compile that failed."""
        return f"{self.function} failed with {self.error}"

    @property
    def is_fatal(self) -> bool:
        """True for an error that ends the program unless errors are suppressed; false for a frame that is skipped."""
        return any(name in self.fail_type for name in _FATAL)

    def starts_in(self, function: str, line: UserLine | None) -> None:
        """Note the compiled function, and its line, where it is known."""
        self.function, self.line, self.frame = function, line, Frame(function)
        if line is not None:
            self.frame = Frame(function, normalise.short_path(line.file), line.line)
