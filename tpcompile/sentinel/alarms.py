"""A problem on this rank -> an alarm to all ranks, one per problem."""

from __future__ import annotations

from tpcompile.evidence.records import Check
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.checks import finding_check, one_rank_check
from tpcompile.sentinel.events import Alarm, RaiseAlarm, RaiseFinding, RaiseOneRank
from tpcompile.sentinel.hang import calls_parted
from tpcompile.sentinel.log_entries import Raised
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.snapshot import Snapshot
from tpcompile.sentinel.store_log import StoreLog

_PROBLEM = "problem"


class Alarms:
    """Raises the alarms of one rank."""

    def __init__(
        self, log: StoreLog, session: CaptureSession, progress: Progress, snapshot: Snapshot, *, ends_job: bool
    ) -> None:
        self._log, self._session, self._progress, self._snapshot = log, session, progress, snapshot
        self._ends_job = ends_job

    def of_compile(self, action: RaiseAlarm) -> None:
        """Raise the alarm that the ranks compiled different code at this position."""
        self._tell(Alarm(key=action.position.key, position=action.position))

    def of_finding(self, action: RaiseFinding) -> None:
        """Raise the alarm that the ranks cannot continue.

        Ranks of other domains lose their connections when this job ends, and then know why.
        """
        problem = finding_check(action.finding)
        if self._ends_job and not action.finding.is_loss:
            self._log.say_problem(problem)
        self.once(problem, action.finding.gone)

    def of_one_rank(self, action: RaiseOneRank) -> None:
        """Raise the alarm that only this rank compiled at this position.

        Whether a compile without collectives is a fault, the comparison says: it may be a call that only this rank
        makes.
        """
        position = action.position
        region = self._progress.region(position.region)
        if region.is_local:
            if self._log.claim(f"passed/{position.key}"):
                num_issued = region.num_issued.get(position.place, 0)
                self._tell(Alarm(key=position.key, position=position, num_issued=num_issued))
            return
        parted = calls_parted(self._snapshot.state(), action.theirs)
        if parted is not None:  # the ranks made different calls before this compile
            self.once(finding_check(parted))
        elif self._log.claim(f"passed/{position.key}"):
            compile_id = region.compiled.get(position.place, "?")
            problem = one_rank_check(self._log.rank, position, action.theirs, self._session.compile(compile_id))
            self._tell(Alarm(key=position.key, position=position, problem=problem))

    def once(self, problem: Check, gone: tuple[int, ...] = (), *, is_interrupted: bool = False) -> None:
        """Raise the alarm for a problem that is not about a compile, unless a rank has already raised one."""
        if self._log.claim(_PROBLEM):
            self._tell(Alarm(key=_PROBLEM, problem=problem, gone=gone, is_interrupted=is_interrupted))

    @property
    def is_raised(self) -> bool:
        """True once a rank has raised the alarm for a problem: the ranks settle it, or have settled it."""
        return self._log.is_claimed(_PROBLEM)

    def _tell(self, alarm: Alarm) -> None:
        self._log.append(Raised, alarm=alarm)
