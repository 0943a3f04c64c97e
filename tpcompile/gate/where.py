"""A rank that the others wait for -> the user's line at which its main thread is, through the store."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Check, CheckId, UserLine
from tpcompile.evidence.text.lines import lines_of, of_program
from tpcompile.ranks.store import RankStore
from tpcompile.torch_api import watching

_ANSWER_S = 2.0
"""Every rank that is alive publishes its line as soon as it sees the alarm."""
_OF_WAITS = (CheckId.ARRIVED, CheckId.TIMED_OUT)


def located(check: Check, store: RankStore) -> Check:
    """A check on a wait, with the line of the first rank that is waited for; of this rank where it names none.

    Every rank calls it, on a different thread than the main one, and publishes its own line.
    """
    with suppress(RuntimeError):  # the store does not respond
        _publish(store)
        if check.id in _OF_WAITS and check.line is None:
            line = _line_of(check.ranks or (store.rank,), store)
            return check.model_copy(update={"line": line})
    return check


def _publish(store: RankStore) -> None:
    line = _line_here()
    store.put(f"line/{store.rank}", line.model_dump(mode="json") if line else None)


def _line_of(ranks: Sequence[int], store: RankStore) -> UserLine | None:
    found, _ = store.gather({rank: f"line/{rank}" for rank in ranks}, timeout_s=_ANSWER_S)
    line = first(found[rank] for rank in ranks if found.get(rank))
    return UserLine.model_validate(line) if line else None


def _line_here() -> UserLine | None:
    frame = watching.main_thread_frame(threading.main_thread().ident or 0)
    frames = traceback.StackSummary.extract(traceback.walk_stack(frame)) if frame else []
    return of_program(lines_of(reversed(frames)))
