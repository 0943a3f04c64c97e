"""What a run of the benchmark measured, as frozen records: JSON in, JSON out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from tpcompile.evidence.records.base import Frozen

SCHEMA_VERSION = 2


class Role(StrEnum):
    """The part of a program in the comparison."""

    OURS = "ours"
    MODE = "mode"
    """Eager, A or B: what users run before mode C."""
    PEER = "peer"
    COMPUTE = "compute"
    """Collectives replaced by the identity, so that outputs are wrong by design."""


class Profile(Frozen):
    """One step by the profiler, on the rank that waited least; None for what is not there on a CPU."""

    kernels: int | None = None
    """Kernels that ran on the GPU."""
    launches: int | None = None
    """Calls of the host that started kernels, or a whole CUDA graph."""
    busy_ms: float | None = None
    """Time in which some kernel ran."""
    communication_ms: float | None = None
    """Time in which a kernel of a collective ran."""
    exposed_ms: float | None = None
    """The part of it in which no other kernel ran."""


class Power(Frozen):
    """Power and clock of one GPU during calls back to back, that of the rank with the lowest clock."""

    watts: float
    joules: float
    """Energy of a step."""
    mhz: int
    """Median clock of the multiprocessors."""
    most_mhz: int
    """Their highest clock."""
    limit_watts: float
    at_limit: bool
    """The driver lowered the clock for most of the time, to stay within the limit."""


class Row(Frozen):
    """One program."""

    name: str
    role: Role
    why_not: str = ""
    """Why it was not measured; empty when it was."""
    has_failed: bool = False
    """It raised an exception or was lost; a program that refuses to run here has not failed."""
    rounds_ms: tuple[float, ...] = ()
    """Mean ms of the calls of each round, on the slowest rank."""
    calls_per_round: int = 0
    regions_per_call: float | None = None
    """Compiled regions that a call enters; None for eager."""
    compile_s: float | None = None
    """Seconds of the first call and of the capture of a CUDA graph, while other programs compile too."""
    peak_bytes: int | None = None
    """Peak of the caching allocator, weights included, on the rank where it is largest; None on CPU."""
    error_ratio: float | None = None
    """Largest error of an output or gradient, as a multiple of that of a single device in the same dtype."""
    worst: str = ""
    """The tensor that has it."""
    reference: str = ""
    """What it is compared with: empty for the preset's block; norms of its own reference, for a different model."""
    profile: Profile = Profile()
    power: Power | None = None
    """None on a CPU, and where there is no energy counter."""
    notes: tuple[str, ...] = ()
    """Printed below the table, such as the fast paths that were chosen."""

    @property
    def median_ms(self) -> float:
        """The median of its rounds."""
        return statistics.median(self.rounds_ms)

    @property
    def spread_ms(self) -> float:
        """Half of the range between the quartiles of its rounds."""
        if len(self.rounds_ms) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds_ms, n=4, method="inclusive")
        return (high - low) / 2


class Product(Frozen):
    """A matrix product [m, k] x [k, n] of the block, on one rank."""

    name: str
    m: int
    n: int
    k: int
    us: float
    tflops: float


class Floors(Frozen):
    """Rates of this machine, measured before the programs are started."""

    gemm_tflops: float
    """The fastest matrix product in the dtype of the block: a large square one, or one of the block's own."""
    read_gbytes_per_s: float
    """Rate of a kernel that reads far more than a cache holds."""
    products: tuple[Product, ...] = ()
    all_reduces: tuple[Mapping[str, Any], ...] = ()
    """Only in reports of before all-reduces were left to scripts/bench_all_reduce.py."""


class Bound(Frozen):
    """The least time that a step can take on one rank."""

    flops: float
    weight_bytes: int
    flops_ms: float
    """Time of the FLOPs at the rate of the fastest matrix product."""
    bytes_ms: float
    """Time of the bytes at the rate of reading."""

    @property
    def ms(self) -> float:
        """The floor: work and memory traffic overlap at best."""
        return max(self.flops_ms, self.bytes_ms)


class Measured(Frozen):
    """One preset."""

    preset: str
    layers: int
    tokens: int
    """Tokens of a call, all sequences together."""
    train: bool
    dtype: str
    error_limit: float
    floors: Floors
    bound: Bound
    rows: tuple[Row, ...]
    why_no_power: str = ""
    """The first program on GPUs whose energy was not measured, and why; empty when all were."""
    ended_early: str = ""
    """The rank that died or hung, and where; empty for a whole run."""

    def differs(self, row: Row) -> bool:
        """Its outputs are not those of a single device; those of a program without communication are not compared."""
        if row.role is Role.COMPUTE or not row.rounds_ms:
            return False
        return row.error_ratio is None or not row.error_ratio <= self.error_limit  # True for NaN


class Machine(Frozen):
    """The machine and the versions that a report was measured with."""

    device: str
    """Name of the GPU, or `cpu`."""
    cores: int
    torch: str
    triton: str
    cuda: str
    nccl: str
    python: str
    transformers: str


class Report(Frozen):
    """A whole run."""

    schema_version: int = SCHEMA_VERSION
    command: str
    date: str
    world_size: int
    rounds: int
    machine: Machine | None
    """None when the run ended before the floors were measured."""
    measured: tuple[Measured, ...]
