"""A node that takes the rank's own part of a tensor is healthy; any other constant or tensor that differs is not."""

from __future__ import annotations

import pytest

from tests.evidence.samples import between, call, compiled, guard, reduce
from tpcompile.evidence.records import CompileRecord, Layer, Node
from tpcompile.evidence.records.causes import Cause

RANKS = range(2)
X, HALF = "f32[8, 32][32, 1]cpu", "f32[8, 16][16, 1]cpu"
WHOLE = call("relu", value=X)
"""`%1`, on all ranks."""


def program(*takes: Node) -> CompileRecord:
    """The part is `%2`, or the last of what takes it."""
    return compiled(WHOLE, *takes, call("neg", f"%{len(takes) + 1}", value=HALF), reduce(f"%{len(takes) + 2}"))


def narrowed(start: int, size: int = 16) -> CompileRecord:
    return program(call("narrow", "%1", "-1", str(start), str(size), value=f"f32[8, {size}][32, 1]cpu"))


def sliced(start: int, end: int, value: str = "f32[8, 16][32, 1]cpu") -> CompileRecord:
    return program(call("getitem", "%1", f"(Ellipsis, slice({start}, {end}, None))", value=value))


def selected(index: int, of: int = 2) -> CompileRecord:
    viewed = call("view", "%1", "8", str(of), "16", value=f"f32[8, {of}, 16][32, 16, 1]cpu")
    return program(viewed, call("getitem", "%2", f"(Ellipsis, {index}, slice(None, None, None))", value=HALF))


def chunked(index: int, then: str = "neg") -> CompileRecord:
    """Dynamo has a node for every part."""
    parts = [call("getitem", "%2", str(part), value="f32[8, 16][32, 1]cpu") for part in RANKS]
    takes = (call("chunk", "%1", "2", "-1", value="(f32[8, 16], f32[8, 16])"), *parts)
    return compiled(WHOLE, *takes, call(then, f"%{3 + index}", value=HALF), reduce("%5"))


@pytest.mark.parametrize(
    "ranks",
    [
        [narrowed(0), narrowed(16)],
        [sliced(0, 16), sliced(16, 32)],
        [selected(0), selected(1)],
        [chunked(0), chunked(1)],
        [narrowed(8 * rank, 8) for rank in range(4)],
    ],
    ids=["narrow", "slice", "select", "chunk", "of four"],
)
def test_the_part_of_each_rank_is_healthy_and_listed(ranks: list[CompileRecord]) -> None:
    found = between(*ranks)
    assert {one.cause for one in found} == {Cause.RANK_PARAMETRIC} and not any(one.is_red for one in found)
    assert Layer.GRAPH in {one.layer for one in found}


@pytest.mark.parametrize(
    "ranks",
    [
        [narrowed(16), narrowed(0)],
        [narrowed(0), narrowed(8)],
        [narrowed(0, 8), narrowed(8, 8)],
        [narrowed(0, 16), narrowed(16, 8)],
        [sliced(0, 17), sliced(16, 32)],
        [selected(1), selected(0)],
        [selected(0, 4), selected(1, 4)],
        [chunked(1), chunked(0)],
        [chunked(0), chunked(0), chunked(1)],
        [chunked(0), program(call("narrow", "%1", "-1", "16", "16", value=HALF))],
    ],
    ids=["swapped", "overlap", "not the whole", "unlike sizes", "longer", "swapped index", "index of more",
         "swapped chunks", "three ranks, two parts", "different ops"],
)  # fmt: skip
def test_any_other_part_is_red(ranks: list[CompileRecord]) -> None:
    found = between(*ranks)
    assert any(one.is_red for one in found) and Cause.UNKNOWN not in {one.cause for one in found}


def test_an_op_that_takes_no_part_is_red() -> None:
    ranks = [program(call("mylib.draw", "%1", str(16 * rank), value=HALF)) for rank in RANKS]
    assert any(one.is_red for one in between(*ranks))


def test_different_ops_on_the_own_part_are_red() -> None:
    ranks = [chunked(0), chunked(1, "relu")]
    assert any(one.is_red for one in between(*ranks))


def test_a_rank_that_reads_a_different_tensor_is_red() -> None:
    both = (call("tanh", "%1", value=X), call("sigmoid", "%1", value=X))
    ranks = [compiled(WHOLE, *both, call("neg", f"%{2 + rank}", value=X), reduce("%4")) for rank in RANKS]
    assert any(one.is_red for one in between(*ranks))


def test_a_constant_that_differs_beside_the_part_is_the_finding() -> None:
    ranks = [
        compiled(
            WHOLE, narrowed(16 * rank).graphs[0].nodes[1], call("mul", "%2", f"{rank + 2}.0", value=HALF), reduce("%3")
        )
        for rank in RANKS
    ]
    (red,) = [one for one in between(*ranks) if one.is_red]
    assert red.cause == Cause.RANK_CONSTANT and "mul" in red.title


def guarded(rank: int, made: CompileRecord, value: int | None = None) -> CompileRecord:
    """The same with a guard on the rank's own number, as an attribute of a module."""
    own = guard(source="L['self'].rank", says=f"== {rank if value is None else value}")
    return made.model_copy(update={"guards": (*made.guards, own)})


@pytest.mark.parametrize(("ranks", "place"), [([narrowed(0), narrowed(16)], 1), ([chunked(0), chunked(1)], 1),
                                              ([narrowed(0), narrowed(16)], 16)])  # fmt: skip
def test_a_guard_on_the_place_of_the_part_follows_it(ranks: list[CompileRecord], place: int) -> None:
    found = between(*(guarded(rank, made, place * rank) for rank, made in enumerate(ranks)))
    assert {one.layer for one in found if one.cause == Cause.RANK_PARAMETRIC} >= {Layer.GRAPH, Layer.GUARDS}
    assert not any(one.is_red for one in found)


@pytest.mark.parametrize(
    "ranks",
    [
        [program(), program()],
        [program(call("mul", "%1", "1", value=HALF)), program(call("mul", "%1", "2", value=HALF))],
        [narrowed(0), program(call("narrow", "%1", "-1", "16", "16", value=HALF), call("add", "%2", "1", value=HALF))],
        [narrowed(0), narrowed(16), narrowed(16)],
    ],
    ids=["nothing takes a part", "a factor", "a branch", "not a part of each rank"],
)
def test_any_other_guard_on_the_rank_is_red(ranks: list[CompileRecord]) -> None:
    assert any(one.is_red for one in between(*(guarded(rank, made) for rank, made in enumerate(ranks))))
