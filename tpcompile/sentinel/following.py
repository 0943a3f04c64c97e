"""The job's event log -> what this rank makes of it, on a thread that blocks on the next event."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tpcompile.sentinel.agree import GO, OK, PASSED
from tpcompile.sentinel.ending import Alarm
from tpcompile.sentinel.messages import Announcement, Event, Position, RankState
from tpcompile.sentinel.rounds import state_of
from tpcompile.sentinel.sink import logger

if TYPE_CHECKING:
    from tpcompile.sentinel.sentinel import Sentinel

_CLOSE_S = 10.0
_COMPILE_S = 2.0


class Follower:
    """Reads every event from the first to this rank's own `left`."""

    def __init__(self, sentinel: Sentinel) -> None:
        self._sentinel = sentinel
        self._thread = threading.Thread(target=self._run, name="tpcompile-sentinel", daemon=True)
        self._passed: dict[Position, dict[str, Any]] = {}
        """Compiles that another rank went past."""
        self._lock = threading.Lock()
        self._late: threading.Timer | None = None
        """Raises the alarm about a compile that takes long."""

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    @property
    def has_started(self) -> bool:
        """True from `start` on."""
        return self._thread.ident is not None

    def close(self) -> None:
        """Wait for the thread, which ends at this rank's `left` event or when the store is gone."""
        if self._late is not None:
            self._late.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        sentinel = self._sentinel
        try:
            for event in sentinel.channel.events():
                self._heard(event)
                if event.kind == "left" and event.rank == sentinel.rank:
                    return
        except RuntimeError as error:
            sentinel.degrade(f"the job's store is gone: {error}")
        except Exception as error:  # a thread that dies silently would leave the others waiting for answers
            logger.error("rank {}: the sentinel failed", sentinel.rank, exception=error)
            sentinel.degrade(f"{type(error).__name__}: {error}")
        finally:
            sentinel.channel.close_client()

    def _heard(self, event: Event) -> None:
        sentinel = self._sentinel
        if event.kind == "compile" and event.rank != sentinel.rank:
            found = Announcement.model_validate(event.data["announcement"])
            if not sentinel.clock.region(found.position.region).is_reported:
                sentinel.clock.announce(found)
        elif event.kind == PASSED:
            self._heard_passed(Position.model_validate(event.data["position"]), event.data)
        elif event.kind in (OK, GO):
            sentinel.free(Position.model_validate(event.data["position"]))
        elif event.kind == "ask":
            self._answer(event)
        elif event.kind == "left":
            sentinel.left[event.rank] = RankState.model_validate(event.data["state"])
        elif event.kind == "degraded":
            sentinel.degrade(str(event.data["why"]))
        elif event.kind == "alarm" and (sentinel.is_active or sentinel.is_leaving):
            sentinel.ending.settle(Alarm.model_validate(event.data))

    def _answer(self, event: Event) -> None:
        sentinel = self._sentinel
        if event.rank != sentinel.rank:
            sentinel.rounds.put_off()
        sentinel.channel.answer(str(event.data["ask"]), state_of(sentinel))

    def tell_passed(self, found: Announcement) -> None:
        """This rank went past a position where another one compiles; on the main thread or on this one."""
        state = state_of(self._sentinel).model_dump(mode="json")

        def decide() -> None:
            self._sentinel.channel.decide(found.position, PASSED, state=state)

        self._sentinel.safely(decide)

    def _heard_passed(self, position: Position, data: dict[str, Any]) -> None:
        region, place = self._sentinel.clock.region(position.region), (position.call, position.index)
        with self._lock:
            self._passed[position] = data
            has_ended = place in region.ended
        theirs = RankState.model_validate(data["state"])
        if has_ended:
            self._sentinel.problems.raise_one_rank(position, theirs)
        elif place in region.compiled and not region.reason_uneven:
            # It is certain already. What the compile makes says more, but a large one takes minutes. Of an uneven
            # region it is not: only the collectives of what it makes decide.
            self._late = threading.Timer(_COMPILE_S, self._raise_one_rank, [position, theirs])
            self._late.daemon = True
            self._late.start()

    def _raise_one_rank(self, position: Position, theirs: RankState) -> None:
        if self._sentinel.is_active:
            self._sentinel.safely(lambda: self._sentinel.problems.raise_one_rank(position, theirs))
            self._sentinel.channel.close_client()  # of the timer's thread

    def ended_compile(self, position: Position) -> None:
        """A compile of this rank ended; if another rank has gone past it meanwhile, that is a divergence."""
        with self._lock:
            self._sentinel.clock.region(position.region).ended.add((position.call, position.index))
            data = self._passed.get(position)
        if data is not None:
            self._sentinel.problems.raise_one_rank(position, RankState.model_validate(data["state"]))
