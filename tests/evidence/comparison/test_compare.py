"""Digests of all ranks -> divergences: the right layer, class, ranks, item and line."""

from __future__ import annotations

import re

import pytest

from tests.evidence.samples import (
    F32,
    between,
    broken,
    call,
    collective,
    compiled,
    divergences,
    graph,
    guard,
    kernel,
    lowered,
    only,
    record,
    reduce,
    tensor,
)
from tpcompile.evidence.comparison.compare import compare
from tpcompile.evidence.digests.digest import digest_rank, layer_items
from tpcompile.evidence.records import CompileRecord, Divergence, DivergenceClass, Item, Layer
from tpcompile.evidence.records.causes import Cause

RELU = call("torch.relu", "%1", at=7)


def parts(found: Divergence) -> list[tuple[int, ...]]:
    """Groups of ranks, the odd ones out last."""
    return [group.ranks for group in found.groups]


def texts(found: Divergence) -> list[str | None]:
    """What each group has at the first difference."""
    return [group.item.text if group.item else None for group in found.groups]


def lines(found: Divergence) -> list[int]:
    """The user's line of each group, where there is one."""
    return [group.item.line.line for group in found.groups if group.item and group.item.line]


def alone(found: Divergence) -> list[tuple[int, ...]]:
    """The ranks that have what the others lack."""
    assert None in texts(found)
    return [group.ranks for group in found.groups if group.item]


def test_equal_ranks_have_no_divergence() -> None:
    assert between(*[compiled()] * 8) == ()


def test_a_different_environment_is_named_with_both_values() -> None:
    found = divergences(
        record(0, compiled(), environment=(("nccl", "2.27.3"), ("torch", "2.11.0"))),
        record(1, compiled(), environment=(("nccl", "2.27.3"), ("torch", "2.13.0"))),
    )
    assert [(d.layer, d.cls) for d in found] == [(Layer.ENVIRONMENT, DivergenceClass.CONTENT)]
    assert texts(found[0]) == ["torch :: 2.11.0", "torch :: 2.13.0"]


def test_a_variable_set_on_one_rank_only_is_named() -> None:
    found = divergences(record(0, compiled()), record(1, compiled(), environment=(("env TRITON_DEBUG", "1"),)))
    assert (alone(found[0]), found[0].groups[1].item.about) == ([(1,)], "env TRITON_DEBUG")


def test_a_different_stride_is_found_at_the_inputs() -> None:
    found = only(compiled(), compiled(inputs=(tensor(stride="[1, 4]"),)))
    assert (found.layer, found.cls, found.is_red) == (Layer.INPUTS, DivergenceClass.CONTENT, True)
    assert "stride=[8, 1]" in found.groups[0].item.text and "stride=[1, 4]" in found.groups[1].item.text


def test_a_rank_constant_is_found_in_the_graph_with_value_and_line_of_each_side() -> None:
    def with_factor(factor: str) -> CompileRecord:
        return compiled(call("mul", "%0", factor, at=12), reduce("%1"))

    found = only(with_factor("1"), with_factor("2"))
    assert (found.layer, found.cls) == (Layer.GRAPH, DivergenceClass.CONTENT)
    assert texts(found) == [f"%1 :: call mul(%0, 1) -> {F32}", f"%1 :: call mul(%0, 2) -> {F32}"]
    assert lines(found) == [12, 12]
    assert "mul(%0, 1) / mul(%0, 2)" in found.title


def test_an_inserted_op_is_named_on_the_rank_that_has_it() -> None:
    usual = compiled(call("mul", "%0", "2"), reduce("%1"))
    more = compiled(call("mul", "%0", "2"), RELU, reduce("%2"))
    found = only(usual, more)
    assert (alone(found), lines(found)) == ([(1,)], [7])
    assert "torch.relu(%1)" in found.groups[1].item.text


def test_a_removed_op_is_named_on_the_ranks_that_still_have_it() -> None:
    more = compiled(call("mul", "%0", "2"), RELU, reduce("%2"))
    found = only(more, more, more, compiled(call("mul", "%0", "2"), reduce("%1")))
    assert (parts(found), alone(found)) == ([(0, 1, 2), (3,)], [(0, 1, 2)])


def test_a_graph_break_on_one_rank_is_named() -> None:
    found = only(compiled(), compiled(breaks=(broken(at=4),)))
    assert (found.cause, alone(found), lines(found)) == (Cause.GRAPH_BREAK, [(1,)], [4])


def test_a_compile_that_failed_on_one_rank_is_named() -> None:
    found = only(compiled(), compiled(failure="Unsupported"))
    assert (found.cause, alone(found)) == (Cause.COMPILE_FAILED, [(1,)])
    assert found.groups[1].item.fields == {"error": "Unsupported"}


def test_a_break_before_the_first_use_of_a_parameter_wins_over_the_inputs_that_it_hides() -> None:
    bias = tensor("L['self']._parameters['bias']")
    usual = compiled(inputs=(bias, tensor()))
    cut = compiled(call("mul", "%0", "2"), breaks=(broken(at=4),), collectives=())
    after = compiled(function="torch_dynamo_resume_in_forward_at_4", compile_id="1/0")
    found = only(usual, [cut, after])
    assert (found.layer, found.cause, parts(found)) == (Layer.GRAPH, Cause.GRAPH_BREAK, [(0,), (1,)])
    assert found.line is not None and found.line.line == 4


def test_a_failed_compile_wins_over_the_inputs() -> None:
    found = only(compiled(inputs=(tensor(), tensor("L['y']"))), compiled(failure="Unsupported"))
    assert (found.cause, parts(found)) == (Cause.COMPILE_FAILED, [(0,), (1,)])


def test_breaks_that_all_ranks_have_hide_no_other_input() -> None:
    found = only(compiled(breaks=(broken(),)), compiled(breaks=(broken(),), inputs=(tensor(dtype="float64"),)))
    assert found.cause == Cause.DTYPE


def test_a_title_is_cut_before_and_behind_the_difference_never_in_it() -> None:
    found = only(compiled(), compiled(inputs=(tensor(requires_grad=True),)))
    assert found.title.endswith("False / True")
    long = 'against {"allow_bf16_reduce":0,"allow_fp16_reduce":0,"allow_tf32":false,"autocast":{"cached_enabled":true'
    states = (f'{long}}},"num_threads":{count}}}' for count in (1, 2))
    found = only(*(compiled(guards=(guard("GLOBAL_STATE", "", state),)) for state in states))
    assert (found.title, found.cause) == ("num_threads: 1 / 2", Cause.NUM_THREADS)


def test_guards_alone_are_a_finding_of_their_own() -> None:
    found = only(compiled(guards=(guard(says="== 1"),)), compiled(guards=(guard(says="== 2", at=9),)))
    assert (found.layer, found.cls) == (Layer.GUARDS, DivergenceClass.CONTENT)
    assert found.title == "self.scale == 1 / 2"
    assert lines(found) == [3, 9]


def test_an_extra_guard_on_one_rank_is_named() -> None:
    found = only(compiled(), compiled(guards=(guard(), guard("TRUE_MATCH", "L['flag']", "== True"))))
    assert "TRUE_MATCH" in texts(found)[1] and texts(found)[0] is None


def test_opposite_flags_are_one_difference_with_both_sides() -> None:
    flags = [guard(f"{says.upper()}_MATCH", "L['self'].flag", f"== {says}") for says in ("True", "False")]
    found = only(*(compiled(guards=(flag,)) for flag in flags))
    assert [group.item.fields["type"] for group in found.groups] == ["TRUE_MATCH", "FALSE_MATCH"]


def test_a_declared_difference_hides_no_other_about_the_same_value() -> None:
    def with_guards(first: str, second: str) -> CompileRecord:
        return compiled(guards=(guard("LAMBDA_GUARD", "", first), guard("LAMBDA_GUARD", "", second)))

    found = between(
        with_guards("a == 1", "b == 1"),
        with_guards("a == 2", "b == 2"),
        allowed=[("guards", "a == ", "intended, really")],
    )
    assert [d.cls for d in found] == [DivergenceClass.DECLARED, DivergenceClass.CONTENT]


def test_the_order_of_guards_does_not_count() -> None:
    one, two = guard(), guard("TRUE_MATCH", "L['flag']", "== True")
    assert between(compiled(guards=(one, two)), compiled(guards=(two, one, two))) == ()


def test_the_guard_that_says_it_all_is_the_finding_and_names_its_consequences() -> None:
    other = compiled(call("mul", "%0", "3"), reduce("%1"), guards=(guard(says="== 3"),), kernels=(kernel("x * 3"),))
    found = only(compiled(kernels=(kernel(),)), other)
    assert (found.layer, found.title) == (Layer.GUARDS, "self.scale == 1 / 3")
    assert found.consequences == (Layer.GRAPH, Layer.KERNELS)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"reduce_op": "max"}, "reduce_op=max"),
        ({"group": "dp"}, "group=dp"),
        ({"dtype": "bf16"}, "dtype=bf16"),
        ({"shape": "[4, 16]"}, "shape=[4, 16]"),
        ({"op": "reduce_scatter_tensor"}, "reduce_scatter_tensor"),
        ({"waited": False}, "waited=False"),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_collective_that_differs_is_a_hang(change: dict[str, object], shown: str, phase: str) -> None:
    def with_second(**fields: object) -> CompileRecord:
        return compiled(collectives=(collective(phase=phase), collective(phase=phase, **fields)))

    found = only(with_second(), with_second(**change))
    assert (found.layer, found.cls) == (Layer.COLLECTIVES, DivergenceClass.COLLECTIVES)
    assert shown in texts(found)[1] and texts(found)[1].startswith(phase)
    assert lines(found)[1] == 5


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_the_same_collectives_in_a_different_order_are_a_hang(phase: str) -> None:
    one, two = collective("all_reduce", phase), collective("all_gather_into_tensor", phase, reduce_op="")
    found = only(compiled(collectives=(one, two)), compiled(collectives=(two, one)))
    assert found.cls == DivergenceClass.COLLECTIVES


def test_a_different_reduce_op_in_the_graph_is_a_hang_and_not_only_content() -> None:
    found = only(
        compiled(reduce(op="sum")), compiled(reduce(op="max"), collectives=(collective(reduce_op="max"),))
    )  # fmt: skip
    assert (found.layer, found.cls) == (Layer.GRAPH, DivergenceClass.COLLECTIVES)
    assert [group.item.fields["reduce_op"] for group in found.groups] == ["sum", "max"]


def test_a_compile_with_collectives_on_one_rank_only_is_a_hang() -> None:
    found = only(compiled(), [compiled(), compiled(compile_id="1/0", function="extra", phase="C/steady")])
    assert (found.cls, parts(found)) == (DivergenceClass.COLLECTIVES, [(0,), (1,)])
    assert (found.frame, alone(found), "extra" in found.where) == ("extra app/model.py:3", [(1,)], True)


def test_a_compile_without_collectives_on_one_rank_only_is_information() -> None:
    extra = compiled(call("mul", "%0", "9", at=8), compile_id="1/0", function="extra", collectives=())
    found = only(compiled(), [compiled(), extra])
    assert found.cls == DivergenceClass.LABEL and lines(found) == [8]


def test_kernels_that_differ_under_equal_graphs_are_red() -> None:
    found = only(lowered(kernels=(kernel("x * 2"),)), lowered(kernels=(kernel("2 * x"),)))
    assert (found.layer, found.is_red) == (Layer.KERNELS, True)
    assert "x * 2 / 2 * x" in found.title


BOUND = "torch.ops.aten.lt.Scalar"


def bound(value: object, **fields: object) -> CompileRecord:
    """A rank whose lowered graph compares with this vocabulary bound."""
    return lowered(call(BOUND, "%0", str(value), value="b8[4, 8][8, 1]cpu"), **fields)


def factor(value: object, **fields: object) -> CompileRecord:
    """A rank whose lowered graph multiplies by this."""
    return lowered(call("torch.ops.aten.mul.Tensor", "%0", str(value)), **fields)


def test_bounds_that_follow_the_rank_are_listed_and_green() -> None:
    found = only(*(bound(32 * rank) for rank in range(4)))
    assert (found.layer, found.cls, found.is_red) == (Layer.LOWERED, DivergenceClass.RANK_PARAMETRIC, False)
    assert parts(found) == [(0,), (1,), (2,), (3,)] and "(forward)" in found.where


def test_a_kernel_difference_below_explained_bounds_is_explained_by_them() -> None:
    found = only(bound(0, kernels=(kernel("x < 0"),)), bound(32, kernels=(kernel("x < 32 // longer"),)))
    assert found.cls == DivergenceClass.RANK_PARAMETRIC


def test_a_kernel_difference_in_the_other_direction_is_not_explained_by_them() -> None:
    found = between(
        bound(0, kernels=(kernel("a", phase="backward"),)), bound(32, kernels=(kernel("b", phase="backward"),))
    )
    assert [(d.layer, d.is_red) for d in found] == [(Layer.LOWERED, False), (Layer.KERNELS, True)]


@pytest.mark.parametrize("values", [(1, 2), (1.0, 2.0)])
def test_a_factor_that_follows_the_rank_is_red(values: tuple[object, ...]) -> None:
    found = only(*map(factor, values))
    assert (found.layer, found.cls) == (Layer.LOWERED, DivergenceClass.CONTENT)


def test_bounds_that_are_not_affine_in_the_rank_are_red() -> None:
    assert only(*map(bound, (0, 32, 65, 96))).is_red


def test_bounds_that_two_ranks_share_are_red() -> None:
    assert only(*map(bound, (0, 32, 32))).is_red


def test_bounds_under_different_collectives_are_red() -> None:
    found = only(bound(0), bound(32, collectives=(collective(reduce_op="max"),)))
    assert found.cls == DivergenceClass.COLLECTIVES


ALLOW = [("guards", "scale", "scale is per rank on purpose")]


def test_a_declared_difference_is_listed_with_its_reason_and_green() -> None:
    found = only(compiled(), compiled(guards=(guard(says="== 2"),)), allowed=ALLOW)
    assert (found.cls, found.is_red) == (DivergenceClass.DECLARED, False)
    assert ALLOW[0][2] in found.advice
    assert texts(found)[0] != texts(found)[1]


def test_a_declared_difference_hides_no_other_of_its_layer() -> None:
    other = compiled(guards=(guard(says="== 2"), guard("TRUE_MATCH", "L['flag']", "== True")))
    found = between(compiled(), other, allowed=ALLOW)
    assert [d.cls for d in found] == [DivergenceClass.DECLARED, DivergenceClass.CONTENT]


def test_a_declaration_for_a_different_layer_does_not_help() -> None:
    found = only(compiled(), compiled(guards=(guard(says="== 2"),)), allowed=[("graph", "scale", "wrong layer")])
    assert found.cls == DivergenceClass.CONTENT


def test_a_declared_guard_hides_no_red_lowered_difference() -> None:
    found = between(factor(1.0), factor(2.0, guards=(guard(says="== 2"),)), allowed=ALLOW)
    assert [(d.layer, d.is_red) for d in found] == [(Layer.GUARDS, False), (Layer.LOWERED, True)]


def test_a_declared_constant_explains_the_layers_below_it() -> None:
    other = compiled(call("mul", "%0", "3"), reduce("%1"), kernels=(kernel("x * 3"),))
    found = only(compiled(kernels=(kernel(),)), other, allowed=[("graph", "mul", "a per-rank factor")])
    assert (found.layer, found.cls) == (Layer.GRAPH, DivergenceClass.DECLARED)


def test_a_declared_constant_hides_no_collective() -> None:
    other = compiled(call("mul", "%0", "3"), reduce("%1"), collectives=(collective(reduce_op="max"),))
    found = between(compiled(), other, allowed=[("graph", "mul", "a per-rank factor")])
    assert found[-1].cls == DivergenceClass.COLLECTIVES and found[-1].is_red


def test_one_odd_rank_of_eight_stands_alone_and_last() -> None:
    odd = compiled(call("mul", "%0", "8"), reduce("%1"))
    found = only(*[odd if rank == 5 else compiled() for rank in range(8)])
    assert parts(found) == [(0, 1, 2, 3, 4, 6, 7), (5,)]


def test_more_than_two_kinds_of_ranks_are_all_shown() -> None:
    ranks = [compiled(call("mul", "%0", str(n)), reduce("%1")) for n in (1, 1, 2, 3)]
    assert parts(only(*ranks)) == [(0, 1), (2,), (3,)]


def test_a_layer_that_one_rank_did_not_log_is_not_a_difference() -> None:
    whole = lowered(call(BOUND, "%0", "0"), kernels=(kernel(),))
    hit = compiled(guards=(), inputs=(), cache=("fx_graph_cache_hit",))
    assert between(whole, hit) == ()
    assert between(whole, hit, whole) == ()


def test_ranks_that_logged_a_layer_are_compared_although_a_different_rank_did_not() -> None:
    found = only(factor(1.0), compiled(), factor(2.0))
    assert (found.layer, parts(found)) == (Layer.LOWERED, [(0,), (2,)])


def test_domains_are_compared_apart() -> None:
    other = compiled(call("mul", "%0", "3"), reduce("%1"))
    stages = [record(rank, compiled() if rank < 2 else other, domain=f"stage{rank // 2}") for rank in range(4)]
    assert divergences(*stages) == ()
    broken_stage = [*stages[:3], record(3, compiled(), domain="stage1")]
    assert [(d.domain, parts(d)) for d in divergences(*broken_stage)] == [("stage1", [(2,), (3,)])]


def test_a_domain_whose_ranks_cannot_finish_comes_before_one_that_differs_in_a_guard() -> None:
    guarded = [compiled(guards=(guard(says=f"== {rank}"),)) for rank in range(2)]
    later = compiled(call("relu"), reduce("%1"), compile_id="0/1", function="later")
    broke = compiled(compile_id="0/1", function="later", breaks=(broken(at=4),), collectives=())
    programs = [[guarded[0]], [guarded[1]], [guarded[0], later], [guarded[1], broke]]
    records = [record(rank, *compiles, domain=f"stage{rank // 2}") for rank, compiles in enumerate(programs)]
    red = [found for found in divergences(*records) if found.is_red]
    assert [(found.domain, found.cause) for found in red] == [
        ("stage1", Cause.GUARD_ONLY), ("stage1", Cause.GRAPH_BREAK), ("stage0", Cause.GUARD_ONLY),
    ]  # fmt: skip


def test_details_are_fetched_once_per_group_and_only_for_layers_that_differ() -> None:
    records = [record(r, compiled(call("mul", "%0", str(r // 4)), reduce("%1")), world_size=8) for r in range(8)]
    asked: list[tuple[int, Layer]] = []

    def fetch(rank: int, index: int, layer: Layer, part: str) -> tuple[Item, ...]:
        asked.append((rank, layer))
        return layer_items(records[rank].compiles[index], layer, part)

    compare([digest_rank(r) for r in records], fetch)
    assert asked == [(0, Layer.GRAPH), (4, Layer.GRAPH)]


@pytest.mark.parametrize("has_ended", [True, False])
def test_what_a_rank_that_has_ended_did_not_send_is_not_said_to_be_missing_there(has_ended: bool) -> None:
    """It had sent the hash alone; the negative control is a rank that answers."""
    records = [record(r, compiled(call("mul", "%0", str(r)), call("neg", "%1"))) for r in range(2)]

    def fetch(rank: int, index: int, layer: Layer, part: str) -> tuple[Item, ...]:
        return () if rank == 1 and has_ended else layer_items(records[rank].compiles[index], layer, part)

    (found,) = compare([digest_rank(r) for r in records], fetch)
    assert found.is_red
    assert (found.cause is Cause.UNKNOWN, any(group.item for group in found.groups)) == (has_ended, not has_ended)
    if has_ended:
        assert re.match("graph: rank 1 .*other hashes", found.title) and found.layer == Layer.GRAPH


def test_nothing_is_fetched_when_ranks_are_equal() -> None:
    def fetch(*_: object) -> tuple[Item, ...]:
        raise AssertionError("asked for details of equal ranks")

    assert compare([digest_rank(record(r, compiled())) for r in range(8)], fetch) == ()


def test_a_graph_in_a_call_that_only_one_rank_made_is_missing_elsewhere() -> None:
    found = only([compiled(), compiled(phase="C/resized", graphs=(graph(RELU),), compile_id="0/1")], compiled())
    assert (found.is_red, found.frame, alone(found)) == (True, "forward app/model.py:3", [(0,)])
    assert found.where.startswith("C/resized")
