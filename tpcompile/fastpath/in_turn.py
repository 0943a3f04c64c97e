"""Calls of one exchange, as the host makes them -> one after the other on the device, and numbered.

Kernels of one exchange that overlap take words of each other for their own, and nothing on the device sees it. What a
CUDA graph launches when it is replayed passes no host code, and is not seen here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tpcompile.errors import FastPathError


@dataclass
class Turns:
    """The calls of this process with one exchange; the ranks of a group make the same calls, so numbers are equal."""

    count: int = 0
    """Calls so far, those that were refused before a launch too."""
    refused: set[int] = field(default_factory=set)
    """Numbers of those."""
    _lock: Any = field(default_factory=threading.Lock, repr=False)
    _stream: Any = field(default=None, repr=False)
    """Stream of the last call."""

    @contextmanager
    def launch(self, device: torch.device) -> Iterator[None]:
        """A call that launches; what it raises was refused.

        On a different stream than the call before, it waits for that on the device. Raises FastPathError where a
        different thread is in a call.
        """
        if not self._lock.acquire(blocking=False):
            raise FastPathError(
                "two threads called kernels of one exchange at the same time; calls of an exchange must not overlap: "
                "make one exchange for each thread"
            )
        try:
            self.count += 1
            if device.type == "cuda":
                self._wait_for_last(torch.cuda.current_stream(device))
            yield
        except FastPathError:
            self.refused.add(self.count)
            raise
        finally:
            self._lock.release()

    @contextmanager
    def behind(self, device: torch.device) -> Iterator[None]:
        """What is launched inside runs now, behind the calls so far.

        In a capture, on a stream that is not captured; before a capture torch waits for the device.
        """
        if device.type != "cuda":
            yield
            return
        is_capturing = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.Stream(device) if is_capturing else torch.cuda.current_stream(device)
        self._wait_for_last(stream)
        with torch.cuda.stream(stream):
            yield

    def refuse(self) -> None:
        """Count a call that was refused before it got to `launch`."""
        self.count += 1
        self.refused.add(self.count)

    def _wait_for_last(self, stream: Any) -> None:
        last, self._stream = self._stream, stream
        if last is None or last == stream or torch.cuda.is_current_stream_capturing():
            return  # what is captured does not run yet
        stream.wait_event(last.record_event())
