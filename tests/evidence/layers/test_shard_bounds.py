"""The bounds of each rank's shard, kept as Python integers, are healthy; any other integer that differs is not."""

from __future__ import annotations

import pytest

from tests.evidence.samples import between, broken, call, compiled, guard, reduce
from tpcompile.evidence.records import CompileRecord, Divergence, Node
from tpcompile.evidence.records.causes import Cause

IDS, MASK, X = "i64[4, 8][8, 1]cpu", "b8[4, 8][8, 1]cpu", "f32[4, 8][8, 1]cpu"


def embedding(start: int, end: int, *more: Node, owner: str = "L['self'].emb", **guards: int) -> CompileRecord:
    """A rank that looks up the tokens of `[start, end)`, as Megatron does."""
    nodes = (
        call("lt", "%0", str(start), value=MASK),
        call("ge", "%0", str(end), value=MASK),
        call("sub", "%0", str(start), value=IDS),
    )
    values = {f"{owner}.start": start, f"{owner}.end": end} | {f"L['self'].{name}": n for name, n in guards.items()}
    held = tuple(guard(source=source, says=f"== {value}") for source, value in values.items())
    return compiled(*nodes, *more, reduce("%3"), guards=held)


def red(*compiles: CompileRecord) -> list[Divergence]:
    return [found for found in between(*compiles) if found.is_red]


@pytest.mark.parametrize("parts", [(32, 32), (32, 32, 32, 32), (33, 33, 31), (9, 8, 8)])
def test_parts_of_one_range_are_healthy_and_listed(parts: tuple[int, ...]) -> None:
    starts = [sum(parts[:rank]) for rank in range(len(parts))]
    found = between(*(embedding(start, start + size) for start, size in zip(starts, parts, strict=True)))
    assert {one.cause for one in found} == {Cause.RANK_PARAMETRIC} and not any(one.is_red for one in found)


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 32), (33, 64)), ((0, 32), (31, 63)), ((0, 32), (64, 96)), ((8, 32), (32, 64)), ((0, 32), (32, 40)),
     ((32, 64), (0, 32)), ((0, 1), (1, 2)), ((0, 8), (8, 64))],
    ids=["a gap", "an overlap", "one left out", "not from 0", "small", "swapped", "the rank", "large"],
)  # fmt: skip
def test_what_does_not_cut_a_range_into_parts_is_red(first: tuple[int, int], second: tuple[int, int]) -> None:
    found = red(embedding(*first), embedding(*second))
    is_smaller_last = second == (32, 40)
    assert bool(found) != is_smaller_last


def test_one_bound_alone_is_a_value_that_differs() -> None:
    ranks = [
        compiled(call("lt", "%0", n, value=MASK), reduce("%1"), guards=(guard(says=f"== {n}"),)) for n in ("32", "64")
    ]
    assert [found.cause for found in red(*ranks)] == [Cause.PYTHON_VALUE]


def test_bounds_of_two_objects_do_not_make_a_pair() -> None:
    ranks = []
    for start, end in ((0, 32), (32, 64)):
        whole = embedding(start, end)
        apart = (whole.guards[0], guard(source="L['self'].head.end", says=f"== {end}"))
        ranks.append(whole.model_copy(update={"guards": apart}))
    assert red(*ranks)


def test_a_different_value_that_differs_beside_the_bounds_is_the_finding() -> None:
    scaled = [call("mul", "%3", factor, value=X) for factor in ("2", "3")]
    found = red(embedding(0, 32, scaled[0], factor=2), embedding(32, 64, scaled[1], factor=3))
    assert len(found) == 1 and "factor" in found[0].title


def test_a_bound_that_scales_data_is_red() -> None:
    ranks = [embedding(start, start + 32, call("mul", "%3", str(start), value=X)) for start in (0, 32)]
    assert red(*ranks)


def test_an_op_that_only_one_rank_has_is_red() -> None:
    assert red(embedding(0, 32), embedding(32, 64, call("relu", "%3", value=X)))


def test_a_different_bound_beside_those_of_the_shard_is_red() -> None:
    ranks = [
        embedding(start, start + 32, call("lt", "%0", limit, value=MASK)) for start, limit in ((0, "5"), (32, "9"))
    ]
    assert red(*ranks)


@pytest.mark.parametrize("breaks", [(0,), (1,), (0, 1)], ids=["on one rank", "on the other", "elsewhere on both"])
def test_a_graph_break_beside_a_guard_that_differs_is_the_finding(breaks: tuple[int, ...]) -> None:
    ranks = [compiled(call("relu", value=X), guards=(guard(says=f"== {rank}"),)) for rank in range(2)]
    for rank in breaks:
        ranks[rank] = ranks[rank].model_copy(update={"breaks": (broken(at=10 + rank),), "graphs": ()})
    assert [found.cause for found in red(*ranks)] == [Cause.GRAPH_BREAK]
