"""What asks the job's store -> its result, or the reason in time where the store is silent."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from tpcompile.errors import DivergenceError
from tpcompile.ranks.store import LINE

T = TypeVar("T")
_POLL_S = 0.1


def while_answered(talk: Callable[[], T], *, silent_s: float) -> T:
    """What `talk` returns, or raises.

    It runs on a thread of its own: torch's client waits for a server behind a link that is cut until TCP gives up, a
    quarter of an hour, and cannot be woken. Raises DivergenceError when the store has not answered for `silent_s`, or
    cannot be reached.
    """
    ended: SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = SimpleQueue()

    def run() -> None:
        try:
            ended.put((talk(), None))
        except BaseException as error:
            ended.put((None, error))

    Thread(target=run, name="tpcompile-store", daemon=True).start()
    while True:
        try:
            result, error = ended.get(timeout=_POLL_S)
        except Empty:
            since_s = LINE.silent_since()
            if since_s is not None and time.monotonic() - since_s > silent_s:
                raise DivergenceError(_silent(f"for {silent_s:g} s")) from None
            continue
        if isinstance(error, RuntimeError) and LINE.silent_since() is not None:
            raise DivergenceError(_silent(str(error).splitlines()[0])) from error
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


def _silent(how: str) -> str:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    place = f" at {host}:{port}" if host else ""
    return (
        f"the job's store{place} does not answer ({how}); its process, rank 0 or torchrun, "
        "has ended, or the link between the two nodes is cut"
    )
