"""Reports of the benchmark without a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tpcompile.bench.names import ROLES
from tpcompile.bench.records import Bound, Floors, Machine, Measured, Product, Profile, Report, Role, Row

MACHINE = Machine(
    device="NVIDIA H200", cores=32, torch="2.11.0", triton="3.6.0", cuda="13.0", nccl="2.28.0", python="3.12.1",
    transformers="-",
)  # fmt: skip
FLOORS = Floors(
    gemm_tflops=800.0,
    read_gbytes_per_s=4000.0,
    products=(Product(name="qkv", m=8, n=7680, k=5120, us=22.0, tflops=28.6),),
    all_reduces=({"algorithm": "default", "size_bytes": 4096, "us": 37.0},),  # as reports before had them
)
PROFILE = Profile(kernels=80, launches=1, busy_ms=0.5, communication_ms=0.1, exposed_ms=0.05)


def row(name: str, *rounds_ms: float, **fields: Any) -> Row:
    """A program whose outputs are right, in one region where that is the contract."""
    found = {"error_ratio": 1.0, "worst": "forward", "regions_per_call": 1.0, "profile": PROFILE} if rounds_ms else {}
    role = ROLES.get(name.partition(":")[0], Role.PEER)
    return Row(name=name, role=role, rounds_ms=rounds_ms, **(found | fields))


def measured(rows: Sequence[Row], **fields: Any) -> Measured:
    """Eight tokens whose floor is 0.25 ms."""
    found = {
        "preset": "wan14b_8", "layers": 4, "tokens": 8, "train": False, "dtype": "bfloat16", "error_limit": 2.5,
        "floors": FLOORS, "bound": Bound(flops=2e10, weight_bytes=10**9, flops_ms=0.025, bytes_ms=0.25), "rows": rows,
    }  # fmt: skip
    return Measured(**(found | fields))


def report(*presets: Measured) -> Report:
    """As it is written."""
    return Report(
        command="tpcompile bench", date="2026-01-01T00:00:00+00:00", world_size=2, rounds=2, machine=MACHINE,
        measured=presets,
    )  # fmt: skip
