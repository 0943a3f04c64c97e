"""A drawn program -> the same, going wrong on one rank, and which lines a person accepts as the place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tests.evidence.timeline.drawing import Drawing, blocks
from tests.evidence.timeline.program import Collective, Holds, If, Leave, Loop, Program, RegionCall, Run, Statement


@dataclass
class Fault:
    """A fault that was put into a program."""

    branch: Statement | None
    """The branch or loop that decides it; None where no executed line differs."""
    function: str = "main"
    """Function of that line."""
    shows: str = "both"
    """What shows it: what a healthy rank does there, what the odd one does, or both."""
    more: tuple[Statement, ...] = ()
    """Statements whose lines are right, beside the branch and those of the events that show it."""


class Planting:
    """One fault to be planted."""

    def __init__(self, drawing: Drawing, program: Program, draw: random.Random) -> None:
        self.drawing, self.program, self.draw = drawing, program, draw
        self.at_any(lambda _: True)
        self.step, self.persists = draw.randint(1, program.steps - 1), draw.random() < 0.3
        self.branch = If(0, self.is_faulty, [])

    def is_faulty(self, run: Run) -> bool:
        """True where the fault of that rank is active."""
        return run.is_odd and (run.step == self.step or (self.persists and self.step < run.step <= self.program.steps))

    def is_healthy(self, run: Run) -> bool:
        return not self.is_faulty(run)

    def at_any(self, fits: Callable[[Statement], bool]) -> bool:
        """Go to a statement of that sort; False where there is none."""
        places = [
            (function, body, at)
            for function, body in blocks(self.drawing, self.program)
            for at, one in enumerate(body)
            if fits(one)
        ]
        if places:
            self.function, self.body, self.at = self.draw.choice(places)
        return bool(places)

    def put(self, holds: Holds, body: list[Statement], otherwise: list[Statement] | None = None, *, over: int) -> None:
        """A branch in place of `over` statements."""
        self.branch.holds, self.branch.body, self.branch.otherwise = holds, body, otherwise or []
        self.body[self.at : self.at + over] = [self.branch]

    def skip(self) -> Fault:
        self.put(self.is_healthy, [self.body[self.at]], over=1)
        return Fault(self.branch, self.function, "healthy")

    def extra(self) -> Fault:
        self.put(self.is_faulty, [self.drawing.collective()], over=0)
        return Fault(self.branch, self.function, "odd")

    def extra_call(self) -> Fault | None:
        if not self.drawing.regions:
            return None
        self.put(self.is_faulty, [RegionCall(0, self.draw.choice(self.drawing.regions))], over=0)
        return Fault(self.branch, self.function, "odd")

    def other_branch(self) -> Fault:
        self.put(self.is_faulty, [self.drawing.collective()], [self.body[self.at]], over=1)
        return Fault(self.branch, self.function)

    def swap(self) -> Fault | None:
        pair = self.body[self.at : self.at + 2]
        if len(pair) < 2:
            return None
        self.put(self.is_faulty, pair[::-1], pair, over=2)
        return Fault(self.branch, self.function)

    def loop_more(self) -> Fault | None:
        return self._loop(1, "odd")

    def loop_less(self) -> Fault | None:
        return self._loop(-1, "healthy")

    def _loop(self, more: int, shows: str) -> Fault | None:
        if not self.at_any(lambda one: isinstance(one, Loop)):
            return None
        loop = self.body[self.at]
        assert isinstance(loop, Loop)
        loop.more, loop.is_faulty = more, self.is_faulty
        return Fault(loop, self.function, shows)

    def skip_step(self) -> Fault:
        return self._leave_step("continue")

    def early_break(self) -> Fault:
        return self._leave_step("break")

    def _leave_step(self, how: str) -> Fault:
        leave = Leave(0, how)
        self.branch.body = [leave]
        self.program.body.insert(0, self.branch)
        return Fault(self.branch, more=(leave, self.program))

    def more_steps(self) -> Fault:
        self.program.more_steps = self.draw.randint(1, 2)
        return Fault(self.program)

    def fewer_steps(self) -> Fault:
        self.program.more_steps = -self.draw.randint(1, self.program.steps - 2)
        return Fault(self.program)

    def caught(self) -> Fault:
        return self._leave("caught")

    def raised(self) -> Fault:
        return self._leave("raised")

    def exited(self) -> Fault:
        return self._leave("exited")

    def killed(self) -> Fault:
        return self._leave("killed")

    def _leave(self, how: str) -> Fault:
        leave = Leave(0, how)
        self.put(self.is_faulty, [leave], over=0)
        return Fault(self.branch, self.function, "healthy", (leave,))

    def content(self) -> Fault | None:
        if not self.at_any(lambda one: isinstance(one, Collective)):
            return None
        one = self.body[self.at]
        assert isinstance(one, Collective)
        changed = self.draw.choice([{"sizes": "5x4"}, {"dtype": "BFloat16"}])
        one.faulty, one.is_faulty = one.content | changed, self.is_faulty
        return Fault(None, self.function, "odd")

    def variant(self) -> Fault | None:
        if not self.at_any(lambda one: isinstance(one, RegionCall)):
            return None
        one = self.body[self.at]
        assert isinstance(one, RegionCall)
        one.is_faulty = self.is_faulty
        return Fault(None, self.function, "odd")


KINDS: dict[str, tuple[int, Callable[[Planting], Fault | None]]] = {
    "skip": (2, Planting.skip),
    "extra": (2, Planting.extra),
    "extra call": (1, Planting.extra_call),
    "other branch": (1, Planting.other_branch),
    "swap": (1, Planting.swap),
    "loop more": (1, Planting.loop_more),
    "loop less": (1, Planting.loop_less),
    "skip step": (1, Planting.skip_step),
    "early break": (2, Planting.early_break),
    "more steps": (1, Planting.more_steps),
    "fewer steps": (1, Planting.fewer_steps),
    "caught": (1, Planting.caught),
    "raised": (1, Planting.raised),
    "exited": (1, Planting.exited),
    "killed": (1, Planting.killed),
    "content": (1, Planting.content),
    "variant": (1, Planting.variant),
}
"""Fault -> its weight, and how it is planted."""
