"""Statements of a drawn program, and a rank that runs it: the events and executed lines of a program without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.timeline.stream import Event, Kind

FILE = "/home/me/train.py"
Line = tuple[str, int, str]
"""(file, line, function) of an executed line."""
Holds = Callable[["Run"], bool]


@dataclass(eq=False)
class Statement:
    """A statement at a line of its own."""

    line: int


@dataclass(eq=False)
class Collective(Statement):
    """One collective; `faulty` is what it is where the fault of a rank changes its content."""

    op: str
    group: str
    content: dict[str, str]
    faulty: dict[str, str] | None = None
    is_faulty: Holds | None = None


@dataclass(eq=False)
class Region:
    """A compiled function: the collectives of each of its variants."""

    name: str
    line: int
    variants: list[list[Collective]]


@dataclass(eq=False)
class RegionCall(Statement):
    """A call of compiled code; executed lines inside are not seen."""

    region: Region
    is_faulty: Holds | None = None


@dataclass(eq=False)
class Function:
    """A function of the program."""

    name: str
    line: int
    body: list[Statement]


@dataclass(eq=False)
class FunctionCall(Statement):
    """A call of a function of the program."""

    function: Function


@dataclass(eq=False)
class Loop(Statement):
    """A loop; `more` iterations where the fault of a rank changes their number."""

    times: int
    body: list[Statement]
    more: int = 0
    is_faulty: Holds | None = None


@dataclass(eq=False)
class If(Statement):
    """A branch: every k-th step, warm-up, ranks of a subgroup, or the fault of a rank."""

    holds: Holds
    body: list[Statement]
    otherwise: list[Statement] = field(default_factory=list)
    is_of_some_ranks: bool = False
    """Other ranks never go there, and that is healthy."""


@dataclass(eq=False)
class Leave(Statement):
    """`continue`, `break`, an exception that the step catches, one that nothing catches, `sys.exit`, or a kill."""

    how: str


class Left(Exception):
    """A rank left an iteration, the loop or the program."""


@dataclass(eq=False)
class Program(Statement):
    """The loop over steps of the main function, and what comes after it."""

    steps: int
    body: list[Statement]
    epilogue: list[Statement]
    more_steps: int = 0
    """Iterations more, on the rank with the fault."""


@dataclass
class Run:
    """One rank that runs the program to its end."""

    rank: int
    is_odd: bool
    events: list[Event] = field(default_factory=list)
    flow: list[Line] = field(default_factory=list)
    """Lines that it executed, in order: those of branches, loops and calls precede the lines inside."""
    marks: list[int] = field(default_factory=list)
    """For each event the number of executed lines; the last of them is the line of the event."""
    step: int = 0
    how: str = "finished"
    _numbers: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def run(self, program: Program) -> Run:
        """The same, with what it did."""
        more = program.more_steps if self.is_odd else 0
        try:
            for self.step in range(program.steps + more):
                here = self._at(program.line, "main", ())
                self._emit(Kind.ITERATION, here)
                try:
                    self._body(program.body, "main", ())
                except Left as left:
                    if str(left) in ("continue", "caught"):
                        continue
                    if str(left) == "break":
                        break
                    raise
            else:
                self._at(program.line, "main", ())
            self.step = 1 << 20
            self._body(program.epilogue, "main", ())
        except Left as left:
            self.how = str(left)
        return self

    def _at(self, line: int, function: str, outer: tuple[UserLine, ...]) -> tuple[UserLine, ...]:
        """Execute a line -> the stack there."""
        self.flow.append((FILE, line, function))
        return (*outer, UserLine(file=FILE, line=line, function=function))

    def _emit(self, kind: Kind, stack: tuple[UserLine, ...], **fields: object) -> None:
        event = Event.model_validate({"kind": kind, "stack": stack, **fields})
        self._numbers[event.sequence] += 1
        self.events.append(event.model_copy(update={"number": self._numbers[event.sequence]}))
        self.marks.append(len(self.flow))

    def _body(self, body: list[Statement], function: str, outer: tuple[UserLine, ...]) -> None:
        for statement in body:
            self._run(statement, function, outer)

    def _run(self, statement: Statement, function: str, outer: tuple[UserLine, ...]) -> None:
        here = self._at(statement.line, function, outer)
        match statement:
            case Collective():
                self._collective(statement, here)
            case RegionCall():
                self._region(statement, here)
            case FunctionCall():
                self._body(statement.function.body, statement.function.name, here)
            case Loop():
                times = statement.times + (statement.more if self._is(statement.is_faulty) else 0)
                for _ in range(times):
                    self._body(statement.body, function, outer)
                    self._at(statement.line, function, outer)  # also where it ends
            case If():
                self._body(statement.body if statement.holds(self) else statement.otherwise, function, outer)
            case Leave():
                if statement.how in ("raised", "exited"):
                    self._emit(Kind.END, here, name=statement.how)
                raise Left(statement.how)

    def _is(self, holds: Holds | None) -> bool:
        return holds is not None and holds(self)

    def _collective(self, one: Collective, stack: tuple[UserLine, ...], **inside: object) -> None:
        content = one.faulty if one.faulty and self._is(one.is_faulty) else one.content
        self._emit(Kind.COLLECTIVE, stack, name=one.op, group=one.group, content=content, **inside)

    def _region(self, call: RegionCall, stack: tuple[UserLine, ...]) -> None:
        variant = int(self._is(call.is_faulty))
        region = call.region
        self._emit(Kind.CALL, stack, name=region.name, content={"variant": str(variant)})
        number = self.events[-1].number
        for one in region.variants[variant]:
            frame = UserLine(file=FILE, line=one.line, function=region.name)
            self._collective(one, (*stack, frame), region=region.name, call=number)
