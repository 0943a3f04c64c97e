"""An exception that leaves the program -> the rank whose end caused it, or the exception itself."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

import torch.distributed as dist

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Check, CompileRecord, UserLine
from tpcompile.evidence.records.base import known
from tpcompile.sentinel import flight
from tpcompile.sentinel.blackbox import absences
from tpcompile.sentinel.checks import failure_check, finding_check
from tpcompile.sentinel.exited_ranks import lost_to_exited
from tpcompile.sentinel.finding import Finding
from tpcompile.sentinel.hang import why_stuck
from tpcompile.sentinel.messages import RankState
from tpcompile.sentinel.protocol import Protocol
from tpcompile.sentinel.situation import Situation
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.torch_api import watching

_LOSS_S = 1.5
_POLL_S = 0.05
_SAME_SIGNAL_S = 1.0
"""A rank that alone received SIGTERM ends later than this, after it looked for `_LOSS_S` for dead ranks."""
_ANSWER_S = 1.0
"""Short, since ranks that are alive may have failed too and be about to leave."""
_OF_COMMUNICATION = ("Connection", "gloo", "NCCL", "closed by peer", "Socket")


class Losses:
    """Looks for ranks whose end made communication fail here."""

    def __init__(self, log: StoreLog, protocol: Protocol, snapshot: Snapshot) -> None:
        self._log, self._protocol, self._snapshot = log, protocol, snapshot

    def problem(self, error: BaseException, compiles: Sequence[CompileRecord]) -> tuple[Check, tuple[int, ...]]:
        """(what is wrong, ranks that have ended): a rank whose end caused it, else the exception itself."""
        line = line_of(error)
        elsewhere = self._log.first_problem() if is_of_communication(error) else None
        if elsewhere is not None:
            return elsewhere, ()
        found = self.behind(error, line)
        if found is not None:
            return finding_check(found), found.gone
        failed = [compile_ for compile_ in compiles if compile_.failure]
        traced = _innermost(watching.traced_stack(error))
        is_of_compiler = watching.is_of_compiler(error)
        return failure_check(
            self._log.rank, error, line, failed=failed, traced=traced, is_of_compiler=is_of_compiler
        ), ()

    def behind(self, error: BaseException, line: UserLine | None) -> Finding | None:
        """The finding that explains a communication error; tries for `_LOSS_S`."""
        if not is_of_communication(error):
            return None
        raised_at = stack_of(error) or ((line,) if line else ())
        self._log.say_failed(self._state_at(raised_at))
        found = _for_a_moment(
            lambda: self._dead(raised_at) or lost_to_exited(self._protocol.left, self._state_at(raised_at))
        )
        return found or self._aborted_elsewhere(raised_at)

    def at_sigterm(self) -> tuple[Check, tuple[int, ...]] | None:
        """Why this rank has received SIGTERM: a problem of other ranks, or ranks that died before.

        Tries for `_LOSS_S`, since a process may still be ending. None where all ranks received it, as when the job's
        time is over.
        """
        at_s = time.time()
        self._log.say_terminated(at_s)
        elsewhere = self._log.first_problem()
        if elsewhere is not None:
            return elsewhere, ()
        self._log.say_failed(self._snapshot.state())
        found = _for_a_moment(lambda: self._dead(is_no_cause=lambda rank: self._received_same_sigterm(rank, at_s)))
        found = found or self._aborted_elsewhere()
        return (finding_check(found), found.gone) if found is not None else None

    def of_gone(self) -> Check | None:
        """Why ranks do not take part in a comparison whose processes have ended."""
        found = self._dead()
        return finding_check(found) if found is not None else None

    def interrupted(self) -> Finding | None:
        """What this rank waits for in vain, when somebody ends the job; None where it goes on."""
        here = self._snapshot.state()
        if not here.waits:
            return None
        others = set(self._log.members) - self._protocol.left.keys() - {self._log.rank}
        may_live = [rank for rank, found in absences(self._log, others).items() if found.may_live]
        states = ByRank({**self._log.ask(may_live, timeout_s=_ANSWER_S), here.rank: here})
        return self._protocol.asking.waited_for(states, time.monotonic())

    def _received_same_sigterm(self, rank: int, at_s: float) -> bool:
        """True for a rank that received the same SIGTERM: the launcher sends it to one process after the other."""
        theirs_s = self._log.terminated_at(rank)
        return theirs_s is not None and theirs_s > at_s - _SAME_SIGNAL_S

    def _state_at(self, stack: tuple[UserLine, ...]) -> RankState:
        """The state of this rank where it raised: its main thread has left the program meanwhile."""
        return self._snapshot.state().model_copy(update={"stack": stack})

    def _aborted_elsewhere(self, raised_at: tuple[UserLine, ...] = ()) -> Finding | None:
        """A rank of a different domain that aborted: of a stage of one rank nobody else is left to say so."""
        elsewhere = set(range(self._log.world_size)) - set(self._log.members)
        aborted = {rank: found for rank, found in absences(self._log, elsewhere).items() if found.aborted}
        here = self._state_at(raised_at) if raised_at else self._snapshot.state()
        lost = self._protocol.asking.lost(aborted)
        return why_stuck(Situation(ByRank({here.rank: here}), before={}, lost=lost)) if lost else None

    def _dead(
        self, raised_at: tuple[UserLine, ...] = (), *, is_no_cause: Callable[[int], bool] = lambda _: False
    ) -> Finding | None:
        others = set(self._log.members) - self._protocol.left.keys() - {self._log.rank}
        absent = absences(self._log, others)
        ended = self._protocol.asking.lost(absent)
        lost = ended.without([rank for rank in ended if is_no_cause(rank)])
        if not lost:
            return None
        here = self._state_at(raised_at) if raised_at else self._snapshot.state()
        may_live = [rank for rank, found in absent.items() if found.may_live]
        states = {**self._states(may_live), here.rank: here}
        return why_stuck(Situation(ByRank(states), before={}, lost=lost))

    def _states(self, ranks: Sequence[int]) -> dict[int, RankState]:
        """The states of ranks that are alive: one that settles an alarm answers nobody, but has said how it failed."""
        failed = self._log.failed(ranks)
        asked = [rank for rank in ranks if rank not in failed]
        answered = self._log.ask(asked, timeout_s=_ANSWER_S) if asked else {}
        silent = [rank for rank in asked if rank not in answered]
        return {**failed, **answered, **self._log.failed(silent)}


def _for_a_moment(look: Callable[[], Finding | None]) -> Finding | None:
    """Call `look` until it returns a finding, for `_LOSS_S` at most."""
    deadline = time.monotonic() + _LOSS_S
    found = look()
    while found is None and time.monotonic() <= deadline:
        time.sleep(_POLL_S)
        found = look()
    return found


def line_of(error: BaseException) -> UserLine | None:
    """Innermost line of the user's code in the traceback."""
    return _innermost(traceback.extract_tb(error.__traceback__))


def stack_of(error: BaseException) -> tuple[UserLine, ...]:
    """The user's frames where an exception was raised, outermost first, with the callers of all frames it left."""
    raised = error.__traceback__
    callers = flight.user_stack(raised.tb_frame.f_back) if raised else ()
    frames = traceback.extract_tb(raised)
    return (*callers, *known(flight.user_line(frame.filename, frame.lineno or 0, frame.name) for frame in frames))


def _innermost(frames: Sequence[traceback.FrameSummary]) -> UserLine | None:
    lines = (flight.user_line(frame.filename, frame.lineno or 0, frame.name) for frame in reversed(frames))
    return first(known(lines))


def is_of_communication(error: BaseException) -> bool:
    """True for an exception of a collective that could not complete."""
    if isinstance(error, RuntimeError):  # no other type: the program may have connections of its own
        return isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_COMMUNICATION)
    return False
