"""What a run of the benchmark measured, as frozen records: JSON in, JSON out."""

from __future__ import annotations

from enum import StrEnum

from tpcompile.evidence.records.base import Frozen

SCHEMA_VERSION = 2


class Role(StrEnum):
    """What a program is in the comparison."""

    OURS = "ours"
    MODE = "mode"
    """Eager, A or B: where users come from."""
    PEER = "peer"
    COMPUTE = "compute"
    """Without communication: its outputs are not those of the others, by design."""


class Profile(Frozen):
    """Of one step, by the profiler, on the rank that waited least; None of what a CPU has not."""

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
    """Of calls back to back, on the rank whose clock was lowest; energy is that of its GPU."""

    watts: float
    joules: float
    """Of a step."""
    mhz: int
    """Of the multiprocessors, in the median."""
    most_mhz: int
    """What they reach when nothing holds them down."""
    limit_watts: float
    at_limit: bool
    """For most of the time the driver held the clock down to stay within the limit."""


class Row(Frozen):
    """One program."""

    name: str
    role: Role
    why_not: str = ""
    """Why it was not measured; empty when it was."""
    has_failed: bool = False
    """It went wrong, rather than being refused here."""
    rounds_ms: tuple[float, ...] = ()
    """Of each round the mean of its calls, on the slowest rank."""
    calls_per_round: int = 0
    regions_per_call: float | None = None
    """Compiled regions that a call enters; None for eager."""
    compile_s: float | None = None
    """The first call, and the capture of a CUDA graph; programs are compiled at the same time."""
    peak_bytes: int | None = None
    """Of the caching allocator, weights included, largest rank; None on CPU."""
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
    """What a reader of the row has to know, such as the fast paths that were chosen."""

    @property
    def joules(self) -> float | None:
        """Of a step."""
        return None if self.power is None else self.power.joules


class AllReduce(Frozen):
    """One size and algorithm."""

    algorithm: str
    size_bytes: int
    us: float | None
    """In a CUDA graph, on a GPU; None where it cannot run."""
    why_not: str = ""


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
    """Of the fastest matrix product in the dtype of the block: a large square one, or one of the block's own."""
    read_gbytes_per_s: float
    """Of a kernel that reads far more than a cache holds."""
    products: tuple[Product, ...] = ()
    all_reduces: tuple[AllReduce, ...] = ()


class Bound(Frozen):
    """The least time that a step can take on one rank."""

    flops: float
    weight_bytes: int
    flops_ms: float
    """At the rate of the fastest matrix product."""
    bytes_ms: float
    """At the rate of reading."""

    @property
    def ms(self) -> float:
        """The floor: work and memory traffic overlap at best."""
        return max(self.flops_ms, self.bytes_ms)


class Measured(Frozen):
    """One preset."""

    preset: str
    layers: int
    tokens: int
    """Of a call, all sequences together."""
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


class Machine(Frozen):
    """Where it ran."""

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
    """None when the run ended before it was asked."""
    measured: tuple[Measured, ...]
