"""Guards on shards of a dimension that the ranks do not divide: healthy, and nothing else is."""

from __future__ import annotations

import pytest

from tests.evidence.samples import (
    between,
    call,
    compiled,
    guard,
    lowered,
    only,
)
from tpcompile.evidence.records import CompileRecord, DivergenceClass, Layer


def shard(size: str, stride: str = "[8, 1]", source: str = "L['self'].weight._local_tensor") -> CompileRecord:
    says = f"DispatchKeySet(CPU), torch.float32, device=None, requires_grad=True, size={size}, stride={stride})"
    checked = guard("TENSOR_MATCH", source, "").model_copy(update={"expression": f"check_tensor({source}, {says}"})
    return compiled(guards=(guard(), checked))


@pytest.mark.parametrize("sizes", [("[4, 8]", "[3, 8]"), ("[4, 8]", "[4, 8]", "[4, 8]", "[1, 8]")])
def test_guards_on_shards_of_a_dimension_that_the_ranks_do_not_divide_are_green(sizes: tuple[str, ...]) -> None:
    found = only(*map(shard, sizes))
    assert (found.layer, found.cls, found.is_red) == (Layer.GUARDS, DivergenceClass.RANK_PARAMETRIC, False)


@pytest.mark.parametrize(
    "ranks",
    [
        (shard("[3, 8]"), shard("[4, 8]")),
        (shard("[4, 8]"), shard("[2, 8]"), shard("[3, 8]")),
        (shard("[4, 8]"), shard("[3, 7]", "[7, 1]")),
        (shard("[4, 8]"), shard("[3, 8]", "[1, 3]")),
        (shard("[4, 8]", source="L['x']"), shard("[3, 8]", source="L['x']")),
    ],
    ids=["the last has more", "not in order", "two sizes", "another layout", "no shard"],
)
def test_other_differences_of_local_tensors_are_red(ranks: tuple[CompileRecord, ...]) -> None:
    assert only(*ranks).is_red


def test_an_uneven_shard_hides_no_other_guard() -> None:
    other = shard("[3, 8]").model_copy(update={"guards": (guard(says="== 2"), shard("[3, 8]").guards[1])})
    assert [d.is_red for d in between(shard("[4, 8]"), other)] == [False, True]


def test_an_uneven_shard_explains_the_shapes_below_it_and_nothing_else_does() -> None:
    def holding(rows: int, *, guarded: bool = True) -> CompileRecord:
        made = lowered(call("mul", "%0", "2", value=f"f32[{rows}, 8]"))
        return made.model_copy(update={"guards": shard(f"[{rows}, 8]").guards}) if guarded else made

    assert [d.is_red for d in between(holding(4), holding(3))] == [False]
    assert any(d.is_red for d in between(holding(4, guarded=False), holding(3, guarded=False)))


@pytest.mark.parametrize("cut", [(0, 1), (1,)])
def test_shapes_below_a_compile_whose_log_ended_before_its_guards_are_not_judged(cut: tuple[int, ...]) -> None:
    ranks = []
    for rank, rows in enumerate((4, 3)):
        made = lowered(call("mul", "%0", "2", value=f"f32[{rows}, 8]"), guards=shard(f"[{rows}, 8]").guards)
        ended = {"guards": (), "collectives": (), "is_cut": True} if rank in cut else {}
        ranks.append(made.model_copy(update=ended))
    assert not any(divergence.is_red for divergence in between(*ranks))


def test_shapes_below_a_whole_compile_without_guards_are_judged() -> None:
    ranks = [lowered(call("mul", "%0", "2", value=f"f32[{rows}, 8]"), guards=()) for rows in (4, 3)]
    assert any(divergence.is_red for divergence in between(*ranks))
