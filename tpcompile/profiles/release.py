"""CUDA graphs of this process -> released before a process group ends, and before Python does.

A graph that captured NCCL collectives keeps the communicator: `destroy_process_group` would wait for it for ever, and
so would the end of the process.
"""

from __future__ import annotations

import atexit
import weakref
from functools import cache
from typing import Protocol

from tpcompile.sink import Sink
from tpcompile.torch_api.teardown import before_shutdown

logger = Sink("profiles")


class Released(Protocol):
    """What holds CUDA graphs."""

    def release(self) -> None:
        """Drop all graphs; a later call captures again."""
        ...


_HOLDERS: weakref.WeakSet[Released] = weakref.WeakSet()


def follow(holder: Released) -> None:
    """Release its graphs in time, as long as it lives."""
    _install()
    _HOLDERS.add(holder)


def release_all() -> None:
    """Release the graphs of all holders; an error of a device that is lost must not keep the process from its end."""
    for holder in list(_HOLDERS):
        try:
            holder.release()
        except RuntimeError as error:
            logger.warning("a CUDA graph could not be released: {}", error)


@cache
def _install() -> None:
    """Once in a process, when it has graphs."""
    before_shutdown(release_all)
    atexit.register(release_all)
