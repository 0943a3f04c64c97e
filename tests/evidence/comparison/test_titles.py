"""The headline of every kind of finding, whole: the one place where these sentences are pinned.

Record again with UPDATE_GOLDEN=1 pytest tests/evidence/comparison/test_titles.py, and read the diff.
"""

from __future__ import annotations

from tests.evidence.layers.test_kernels import ONE, TWO, launch, lowered_to
from tests.evidence.layers.test_own_parts import narrowed, program
from tests.evidence.layers.test_shard_bounds import embedding
from tests.evidence.layers.test_uneven_shards import shard
from tests.evidence.samples import (
    between,
    broken,
    call,
    collective,
    compiled,
    guard,
    kernel,
    lowered,
    reduce,
    tensor,
)
from tests.golden import DATA, recorded
from tpcompile.evidence.records import CompileRecord

GOLDEN = DATA / "titles.txt"
A_SET = guard(source="G['KEYS']", says="== {'a', 'b'}")
TENSOR = "check_tensor(L['x'], Tensor, DispatchKeySet(CPU), torch.float32, requires_grad=False, size=[{}, 8])"


def runs(*ops: str, **fields: object) -> CompileRecord:
    """Ops on the input, one after the other."""
    return compiled(*(call(f"torch.{op}", "%0") for op in ops), **fields)


def on_values(*operands: str, **fields: object) -> CompileRecord:
    """Reduces the tanh (%1) and the relu (%2) of the input, in the given order."""
    return compiled(
        call("torch.tanh", "%0"), call("torch.relu", "%0"), *map(reduce, operands), call("mul", "%3", "%4"), **fields
    )


def again(reason: str, **fields: object) -> list[CompileRecord]:
    """A rank that compiles twice."""
    return [compiled(), compiled(compile_id="0/1", recompile_reasons=(f"0/0: {reason}",), **fields)]


def issuing(**fields: object) -> CompileRecord:
    return compiled(collectives=(collective(**fields),))


def guarded(size: object) -> CompileRecord:
    return compiled(guards=(guard("TENSOR_MATCH", "L['x']", TENSOR.format(size)),))


def lowered_bound(rank: int) -> CompileRecord:
    return lowered(call("torch.ops.aten.lt.Scalar", "%0", str(32 * rank), value="b8[4, 8][8, 1]cpu"))


EXTRA = compiled(call("mul", "%0", "9", at=8), compile_id="1/0", function="extra", collectives=())
BIAS = tensor("L['self']._parameters['bias']")
CASES: dict[str, tuple[CompileRecord | list[CompileRecord], ...]] = {
    "graph break": (compiled(), compiled(breaks=(broken(),))),
    "failed compile": (compiled(), compiled(failure="Unsupported")),
    "failed in the backend": (compiled(), runs("relu", failure="RecursionError", collectives=())),
    "input": (compiled(), compiled(inputs=(tensor(dtype="bfloat16"),))),
    "input of one rank": (compiled(), compiled(inputs=(tensor(), BIAS))),
    "guard": (compiled(), compiled(guards=(guard(says="== 2"),))),
    "guard of one rank": (compiled(), compiled(guards=(guard(), guard("TRUE_MATCH", "L['flag']", "== True")))),
    "guard on a size": (guarded(4), guarded(None)),
    "collective": (issuing(), issuing(reduce_op="max")),
    "broadcast": (issuing(op="broadcast", src="0"), issuing(op="broadcast", src="1")),
    "extra collective": (compiled(), compiled(collectives=(collective(), collective()))),
    "constant": (runs("relu"), compiled(call("mul", "%0", "3"))),
    "op of one rank": (compiled(), compiled(call("torch.exp", "%0"), call("mul", "%0", "2"), reduce("%2"))),
    "different tensor": (on_values("%1", "%2"), on_values("%1", "%1")),
    "order of collectives": (on_values("%1", "%2"), on_values("%2", "%1")),
    "order of ops": (runs("exp", "cos", "sin"), runs("cos", "sin", "exp")),
    "order of a set": (on_values("%1", "%2", guards=(A_SET,)), on_values("%2", "%1", guards=(A_SET,))),
    "recompile by size": (again("tensor 'x' size mismatch at index 0. expected 4, actual 8"), compiled()),
    "recompile by value": (again("L['self'].scale == 1", guards=(guard(says="== 2"),)), compiled()),
    "recompile by setting": (again("GLOBAL_STATE changed: grad_mode ", guards=()), compiled()),
    "recompile limit": (again("L['self'].scale == 1", limit_reached=True), compiled()),
    "extra compile": ([compiled(), EXTRA], compiled()),
    "backend": (lowered(call("torch.ops.aten.mul.Tensor", "%0", "2")), compiled()),
    "launches": (lowered_to(*ONE), lowered_to(*TWO)),
    "buffers": (lowered_to(launch("poi add")), lowered_to(launch("poi add", writes=2))),
    "code": (lowered(kernels=(kernel("x * 2"),)), lowered(kernels=(kernel("2 * x"),))),
    "own part": (narrowed(0), narrowed(16)),
    "bounds": (embedding(0, 32), embedding(32, 64)),
    "uneven shards": (shard("[4, 8]"), shard("[3, 8]")),
    "lowered constants": (lowered_bound(0), lowered_bound(1)),
    "part of a different size": (narrowed(0), program(call("narrow", "%1", "-1", "16", "16"))),
}


def test_headlines_are_as_recorded() -> None:
    found: list[str] = []
    for name, ranks in CASES.items():
        found += [f"{name}: {one.cls.value}: {one.cause.value}: {one.title}" for one in between(*ranks)]
    assert found == recorded(GOLDEN, "".join(f"{text}\n" for text in found)).splitlines()
