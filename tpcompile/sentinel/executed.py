"""The lines of user code that this rank executes, and what the other ranks have left of theirs."""

from __future__ import annotations

import traceback
from collections.abc import Iterable

from tpcompile.errors import ConfigError
from tpcompile.evidence.timeline.flow import Code, Flow, until
from tpcompile.recording import early
from tpcompile.recording.flow import FlowRecorder
from tpcompile.recording.ring import flow_left
from tpcompile.sentinel import flight
from tpcompile.sentinel.progress import Progress
from tpcompile.sentinel.store_log import StoreLog
from tpcompile.torch_api.point_to_point import Messages


class Executed:
    """Recorded from `open` to `close`; what was recorded stays known after that.

    Raises ConfigError for a `flow` that is none of None, True and False.
    """

    def __init__(
        self, log: StoreLog, progress: Progress, messages: Messages, *, flow: bool | None, follow: Iterable[str]
    ) -> None:
        if not (flow is None or isinstance(flow, bool)):
            raise ConfigError(f"flow={flow!r} must be True, False, or None for Python 3.12 and later")
        self._log, self._progress, self._messages = log, progress, messages
        self._recorder, self._follow = FlowRecorder(), tuple(follow)
        self._is_wanted, self._by_settrace = flow is not False, flow is True
        self._left: Flow | None = None
        self._raised_at: list[tuple[str, int]] = []

    def open(self, name: str) -> None:
        """Begin to record, into the ring of that name, or go on with what was recorded so far."""
        if not self._is_wanted:
            early.end()
            return
        self._recorder = early.recorder(self._follow)
        if not self._recorder.start(name, by_settrace=self._by_settrace):
            self._progress.mark, self._progress.pause_flow = self._recorder.mark, self._recorder.pause

    def raised(self, error: BaseException | None) -> None:
        """An exception ends the block: what is executed from where it was raised on is no way of the program."""
        if error is None:
            return
        self._recorder.pause(True)
        frames = traceback.walk_tb(error.__traceback__)
        self._raised_at = [(frame.f_code.co_filename, line) for frame, line in frames]

    def keep(self) -> None:
        """Publish what was recorded, before this rank leaves: the others may find that it parted from them."""
        self._left = self.flow_of(self._log.rank)
        if self._left is not None:
            self._log.keep_flow(self._left)

    def close(self) -> None:
        """End the recording."""
        self._recorder.stop()

    @property
    def num_recorded(self) -> int:
        """Steps that this rank has recorded, kept or not."""
        return self._recorder.num_recorded

    def issuing(self) -> tuple[Code, ...]:
        """Lines of this rank that have issued a collective."""
        issued = flight.recorded(begun=self._progress.calls_begun())
        return flight.issuing_places(issued, flight.messages(self._messages.posted()))

    def flow_of(self, rank: int) -> Flow | None:
        """What this rank has executed, or what another one of this host has, or has left."""
        log = self._log
        if rank == log.rank:
            found = self._left or self._recorder.flow()
            return found and until(found, self._raised_at).model_copy(update={"issuing": self.issuing()})
        return log.kept_flow(rank) or flow_left(log.process_of(rank).black_box)
