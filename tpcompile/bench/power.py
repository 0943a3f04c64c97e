"""Calls back to back, and the counters of NVML -> watts, joules of a step, and the clock of the GPU.

A GPU at its power limit lowers its clock: the time of a step is then its energy over the limit, and overlapping more of
it gains nothing. NVML is a library of NVIDIA's driver; the package nvidia-ml-py has it for Python (module `pynvml`).
"""

from __future__ import annotations

import importlib
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from tpcompile.bench.records import Power
from tpcompile.bench.step import timed_ms

_EVERY_S = 0.005
"""Seconds between two readings; the energy counter moves every 0.1 s, so each move is seen within 5 ms."""
_FEWEST_MOVES = 3
"""Moves of the counter without which the time between the first and the last says too little."""


class NoMeterError(Exception):
    """There are no counters; the text is the reason, in one line."""


class Sample(NamedTuple):
    """One reading of the counters."""

    at_s: float
    joules: float
    """Energy since the driver was loaded; the counter moves some ten times a second."""
    mhz: int
    """Clock of the multiprocessors."""
    at_limit: bool
    """The driver lowers the clock to stay within the power limit."""


class Meter:
    """The counters of one GPU. Raises NoMeterError where there are none."""

    def __init__(self, device: torch.device) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            raise NoMeterError("pip install 'tpcompile[energy]'") from None
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.limit_watts = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3
            self.most_mhz: int = self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self.sample()
        except self._nvml.NVMLError as error:
            raise NoMeterError(f"NVML: {error}") from None

    def sample(self) -> Sample:
        """Read the counters."""
        nvml, gpu = self._nvml, self._gpu
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
        return Sample(
            at_s=time.perf_counter(),
            joules=nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1e3,
            mhz=nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            at_limit=bool(reasons & nvml.nvmlClocksThrottleReasonSwPowerCap),
        )

    def samples_until(self, over: threading.Event) -> list[Sample]:
        """Readings every few milliseconds. Raises NoMeterError if one fails."""
        found = []
        try:
            while not over.wait(_EVERY_S):
                found.append(self.sample())
        except self._nvml.NVMLError as error:
            raise NoMeterError(f"NVML: {error}") from None
        return found


def drawn(call: Callable[[], object], num_calls: int, device: torch.device) -> Power:
    """Energy of these calls. Raises NoMeterError without counters, after the calls, which all ranks have to make."""
    try:
        meter = Meter(device)
    except NoMeterError:
        timed_ms(call, num_calls, device)
        raise
    over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(meter.samples_until, over)
        try:
            ms = timed_ms(call, num_calls, device)
        finally:
            over.set()
    return power(reading.result(), ms, limit_watts=meter.limit_watts, most_mhz=meter.most_mhz)


def power(samples: Sequence[Sample], ms: float, *, limit_watts: float, most_mhz: int) -> Power:
    """Samples and the ms of a step -> its energy, from the power between the counter's first and last move.

    Raises NoMeterError where the counter moved too rarely, or back.
    """
    added = [after.joules - before.joules for before, after in itertools.pairwise(samples)]
    if min(added, default=0.0) < 0:
        raise NoMeterError("the energy counter was reset meanwhile")
    moves = [number for number, joules in enumerate(added, start=1) if joules > 0]
    if len(moves) < _FEWEST_MOVES:
        raise NoMeterError(f"the energy counter moved {len(moves)} times, at least {_FEWEST_MOVES} are needed")
    within = samples[moves[0] : moves[-1] + 1]
    watts = (within[-1].joules - within[0].joules) / (within[-1].at_s - within[0].at_s)
    return Power(
        watts=watts,
        joules=watts * ms / 1e3,
        mhz=round(statistics.median(one.mhz for one in within)),
        most_mhz=most_mhz,
        limit_watts=limit_watts,
        at_limit=statistics.mean(one.at_limit for one in within) > 0.5,
    )
