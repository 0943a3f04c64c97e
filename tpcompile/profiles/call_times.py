"""Times of the candidate profiles on every rank -> the one that all ranks run: the slowest rank counts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from tpcompile.errors import ConfigError
from tpcompile.evidence.records import Frozen

NUM_ROUNDS, CALLS_PER_ROUND, WARM_UPS = 5, 5, 2
"""Candidates take turns, so that a slow moment of the machine meets all of them, and the median leaves it out."""
MIN_RATIO = 1.03
"""A candidate replaces the simpler one before it when that takes so many times as long."""

Timings = dict[str, float | str]
"""Candidate -> median ms of a call on this rank, or why it cannot run."""


class Measurement(Frozen):
    """What was chosen at the first call, the same on all ranks."""

    profile: str
    slowest_ms: dict[str, float] = {}
    """Candidate -> median ms of a call on the slowest rank; empty where there is one candidate only."""
    refused: dict[str, str] = {}
    """Candidate -> why it cannot run."""

    @property
    def text(self) -> str:
        """`graphed of default 2.02 ms, graphed 0.56 ms`."""
        if not self.slowest_ms:
            return f"{self.profile}, the only candidate"
        times = [f"{name} {ms:.3g} ms" for name, ms in self.slowest_ms.items()]
        refused = [f"{name} refused: {why}" for name, why in self.refused.items()]
        return f"{self.profile} of {', '.join([*times, *refused])}"


def timings(calls: Mapping[str, Callable[[], Any]], finish: Callable[[], object]) -> Timings:
    """Median ms of each candidate in interleaved rounds; `finish` waits for the device.

    All ranks call it alike, since candidates communicate.
    """
    found: Timings = {}
    for name, call in calls.items():
        try:  # a candidate that cannot run says so at its first call
            for _ in range(WARM_UPS):
                call()
        except ConfigError as error:  # the program cannot run so, on any rank
            found[name] = str(error)
    rounds: dict[str, list[float]] = {name: [] for name in calls if name not in found}
    for _ in range(NUM_ROUNDS):
        for name, times_ms in rounds.items():
            finish()
            started_s = time.perf_counter()
            for _ in range(CALLS_PER_ROUND):
                calls[name]()
            finish()
            times_ms.append((time.perf_counter() - started_s) * 1e3 / CALLS_PER_ROUND)
    return found | {name: statistics.median(times_ms) for name, times_ms in rounds.items()}


def choose(by_rank: Mapping[int, Timings]) -> Measurement:
    """The fastest candidate on the slowest rank, in the order of the candidates where they are about as fast.

    A candidate that one rank cannot run is run by none. Raises ConfigError when none is left.
    """
    names: dict[str, None] = {}  # an ordered set
    for timed in by_rank.values():
        names |= dict.fromkeys(timed)
    refused: dict[str, str] = {}
    slowest_ms: dict[str, float] = {}
    for name in names:
        for timed in by_rank.values():
            value = timed.get(name, "not a candidate on every rank")
            if isinstance(value, str):
                refused.setdefault(name, value)
            else:
                slowest_ms[name] = max(value, slowest_ms.get(name, value))
    for name in refused:
        slowest_ms.pop(name, None)
    if not slowest_ms:
        raise ConfigError("; ".join(refused.values()))
    best, *others = slowest_ms
    for name in others:
        if slowest_ms[name] * MIN_RATIO < slowest_ms[best]:
            best = name
    return Measurement(profile=best, slowest_ms=slowest_ms, refused=refused)
