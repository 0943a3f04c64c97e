"""Manifests without a compile: a block that is repeated, with long names."""

from __future__ import annotations

from tpcompile.evidence.records import UserLine
from tpcompile.fusion.manifest_records import (
    Call,
    Decisions,
    GraphManifest,
    Launch,
    Manifest,
    Resources,
    Role,
    Totals,
)

NORM = Call(role=Role.KERNEL, name="triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", kind="red", source="n")
MATMUL = Call(role=Role.EXTERN, name="extern_kernels.mm", kind="extern_kernels")
ACTIVATION = Call(role=Role.KERNEL, name="triton_poi_fused_mul_silu_1", kind="poi", source="a")
TEMPLATE = Call(role=Role.KERNEL, name="triton_tem_fused_mm_2", kind="tem", source="t")
ALL_REDUCE = Call(role=Role.COLLECTIVE, name="torch.ops._c10d_functional.all_reduce_.default", kind="all_reduce_")
WAIT = Call(role=Role.WAIT, name="torch.ops._c10d_functional.wait_tensor.default", kind="wait_tensor")
COPY = Call(role=Role.COPY, name="copy_", kind="eager")
BLOCK = (NORM, MATMUL, ACTIVATION, TEMPLATE, ALL_REDUCE, WAIT, COPY)
LONG_OPS = tuple(f"aten.an_operator_with_a_long_name_{number}" for number in range(12))
LINES = tuple(UserLine(file=f"/project/models/a_long_name_of_a_module_{at}.py", line=1000 + at) for at in range(4))


def resources(registers: int = 40, spills: int = 0) -> Resources:
    return Resources(configuration="XBLOCK=1 num_warps=8", registers=registers, spills=spills, shared_bytes=16)


def launch(call: Call, number: int, **fields: object) -> Launch:
    known = {
        "node": f"op{number}",
        "ops": LONG_OPS if call is NORM else (f"aten.op{number}",),
        "reads": {"arg0": 2**20 * (number % 7 + 1)},
        "writes": {f"buf{number}": 2**20},
        "lines": LINES if call is NORM else LINES[:1],
    }
    return Launch(**call.model_dump(), **{**known, **fields})


def graph(num_launches: int, *, phase: str = "forward") -> GraphManifest:
    calls = [BLOCK[number % len(BLOCK)] for number in range(num_launches)]
    decisions = Decisions(
        before=(),
        after=(),
        pairs=(),
        fused=(),
        num_rounds=1,
        ops=Totals(kernels=3 * num_launches, bytes=2**22 * 3 * num_launches),
        outputs=(),
    )
    launches = tuple(launch(call, number) for number, call in enumerate(calls))
    return GraphManifest(compile_id="0/0", phase=phase, is_aligned=True, launches=launches, decisions=decisions)


def manifest(*graphs: GraphManifest) -> Manifest:
    return Manifest(torch="2.13.0", triton="3.9.0", device="sm_90", settings={}, graphs=graphs)
