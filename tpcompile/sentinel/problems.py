"""What went wrong on this rank -> an alarm that all ranks settle together."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import torch.distributed as dist

from tpcompile.evidence.alone import reason_cause
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.checks import ALIVE, MOVING, NO_ERROR, TOGETHER
from tpcompile.evidence.reasontext import Reason, nearest_reason, parse_reason
from tpcompile.evidence.records import Check, CompileRecord, Status, UserLine
from tpcompile.sentinel import adapter, flight, hang
from tpcompile.sentinel.ending import Alarm
from tpcompile.sentinel.hang import Finding, Lost
from tpcompile.sentinel.messages import Position, RankState
from tpcompile.sentinel.rounds import state_of

if TYPE_CHECKING:
    from tpcompile.sentinel.sentinel import Sentinel

_LOSS_S = 1.5
_OF_COMMUNICATION = ("Connection", "gloo", "NCCL", "closed by peer", "Socket")


class Problems:
    """Raises alarms; each at most once in the job."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel

    def raise_difference(self, position: Position, problem: Check | None = None) -> None:
        """What the ranks compiled at a position is not the same: they explain it together."""
        alarm = Alarm(key=position.key, position=position, problem=problem)
        self._sentinel.channel.tell("alarm", **alarm.model_dump(mode="json"))

    def raise_one_rank(self, position: Position, theirs: RankState) -> None:
        """This rank compiled at a position that another one went past."""
        sentinel = self._sentinel
        if not sentinel.channel.claim(f"passed/{position.key}"):
            return
        compile_id = sentinel.clock.region(position.region).compiled.get((position.call, position.index), "?")
        compile_ = sentinel.session.compile(compile_id)
        text = nearest_reason(compile_.recompile_reasons) if compile_ else ""
        reason = parse_reason(text) if text else None
        why = f" because {reason.guard}" if reason else ""
        at = f", now at {theirs.line}" if theirs.line else ""
        problem = Check(
            name=TOGETHER,
            mode="",
            status=Status.FAIL,
            expected="all ranks compile at the same call, or none",
            observed=f"rank {sentinel.rank} compiled at {position}{why}; rank {theirs.rank} went on without it{at}",
            line=(reason.line if reason else None) or (compile_.line if compile_ else None),
            ranks=(sentinel.rank,),
            cause=_cause_of(reason, compile_),
        )
        self.raise_difference(position, problem)

    def raise_finding(self, finding: Finding) -> None:
        """The ranks cannot go on."""
        name, expected = (ALIVE, "all ranks run to the end") if finding.is_loss else (MOVING, "every wait can end")
        check = Check(
            name=name, mode="", status=Status.FAIL, expected=expected, observed=finding.observed,
            details=finding.details, line=finding.line, ranks=finding.ranks, cause=finding.cause,
        )  # fmt: skip
        self._raise(check, gone=finding.gone)

    def raised(self, error: BaseException) -> None:
        """An exception leaves the program: a rank that died or left is its cause, if there is one."""
        line = _line_of(error)
        found = self._loss(line) if _is_of_communication(error) else None
        if found is not None:
            self.raise_finding(found)
        else:
            self._raise(self._failure(error, line), gone=())

    def _loss(self, line: UserLine | None) -> Finding | None:
        """The rank whose end made communication fail here, looked for during a moment."""
        sentinel, deadline = self._sentinel, time.monotonic() + _LOSS_S
        while True:
            here = state_of(sentinel).model_copy(update={"stack": (line,) if line else ()})
            found = self.of_lost(sentinel.rounds.lost(settle_s=0.0), here) or hang.departed(sentinel.left, here)
            if found is not None or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    @staticmethod
    def of_lost(gone: list[Lost], here: RankState) -> Finding | None:
        """The finding that names dead ranks, None when there are none."""
        return hang.judge({here.rank: here}, gone, before={}) if gone else None

    def _failure(self, error: BaseException, line: UserLine | None) -> Check:
        lines = [text for text in str(error).splitlines() if text.strip()]
        # "backend='inductor' raised:" says nothing without the line after it.
        says = " ".join(text.strip() for text in lines[: 2 if lines and lines[0].endswith(":") else 1])
        cause = Cause.COMPILE_FAILED if adapter.is_of_compiler(error) else Cause.RAISED
        if cause == Cause.COMPILE_FAILED:
            line = self._failed_at() or line  # the traceback of such an error passes through the compiler
        return Check(
            name=NO_ERROR, mode="", status=Status.FAIL, expected="no exception",
            observed=f"{type(error).__name__}: {says}", line=line, ranks=(self._sentinel.rank,), cause=cause,
        )  # fmt: skip

    def _failed_at(self) -> UserLine | None:
        """The user's line of the compile that failed last, as a comparison with the other ranks would name it."""
        failed = [compile_ for compile_ in self._sentinel.session.compiles() if compile_.failure]
        return failed[-1].failure_line or failed[-1].line if failed else None

    def _raise(self, problem: Check, *, gone: tuple[int, ...]) -> None:
        def tell() -> None:
            if self._sentinel.channel.claim("problem"):
                alarm = Alarm(key="problem", problem=problem, gone=gone)
                self._sentinel.channel.tell("alarm", **alarm.model_dump(mode="json"))

        self._sentinel.safely(tell)


def _cause_of(reason: Reason | None, compile_: CompileRecord | None) -> Cause:
    """Why one rank alone compiled, as far as that rank knows."""
    if compile_ is not None and compile_.limit_reached:
        return Cause.RECOMPILE_LIMIT
    return reason_cause(reason) if reason else Cause.UNKNOWN


def _line_of(error: BaseException) -> UserLine | None:
    """Innermost line of the user's that the exception went through."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    lines = (flight.user_line(frame.filename, frame.lineno or 0, frame.name) for frame in frames)
    return next((line for line in lines if line is not None), None)


def _is_of_communication(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_COMMUNICATION)
