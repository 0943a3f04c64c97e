"""Programs, nodes and collectives in a different order, and what only moves them: a hang, or none."""

from __future__ import annotations

from tests.evidence.comparison.test_compare import bound, parts
from tests.evidence.samples import (
    between,
    call,
    collective,
    compiled,
    graph,
    kernel,
    line,
    lowered,
    only,
    reduce,
)
from tpcompile.evidence.records import CompileRecord, DivergenceClass, Kernel, Layer, Node
from tpcompile.evidence.records.causes import Cause


def test_two_equal_graphs_under_swapped_labels_are_information() -> None:
    one = compiled(call("mul", "%0", "2"), compile_id="0/0", collectives=())
    two = compiled(call("mul", "%0", "3"), compile_id="1/0", collectives=())
    swapped = [two.model_copy(update={"compile_id": "0/0"}), one.model_copy(update={"compile_id": "1/0"})]
    found = only([one, two], swapped)
    assert (found.cls, found.is_red) == (DivergenceClass.LABEL, False)


def test_two_programs_with_collectives_that_change_places_are_a_hang() -> None:
    one = compiled(call("mul", "%0", "2"), compile_id="0/0", function="one", line=line(1))
    two = compiled(call("mul", "%0", "3"), compile_id="1/0", function="two", line=line(2))
    local = compiled(call("relu", "%0"), compile_id="2/0", collectives=())
    found = only([local, one, two], [one, two, local], [local, two, one])
    assert (found.cls, found.cause) == (DivergenceClass.COLLECTIVES, Cause.ORDER_FORWARD)
    assert parts(found) == [(0, 1), (2,)]
    assert [group.line and group.line.line for group in found.groups] == [1, 2]


def test_two_programs_with_collectives_under_swapped_labels_are_information() -> None:
    one, two = compiled(call("mul", "%0", "2"), compile_id="0/0"), compiled(call("mul", "%0", "3"), compile_id="1/0")
    relabelled = [one.model_copy(update={"compile_id": "1/0"}), two.model_copy(update={"compile_id": "0/0"})]
    assert only([one, two], relabelled).cls == DivergenceClass.LABEL


def test_variants_of_one_function_with_equal_collectives_may_change_places() -> None:
    three, four = (compiled(call("mul", "%0", str(n)), compile_id=f"0/{n}") for n in (3, 4))
    assert only([three, four], [four, three]).cls == DivergenceClass.LABEL
    other = four.model_copy(update={"collectives": (collective("all_gather"),)})
    assert only([three, other], [other, three]).cls == DivergenceClass.COLLECTIVES


def test_programs_in_a_different_order_can_be_declared() -> None:
    one, two = (compiled(call("mul", "%0", str(n)), compile_id=f"{n}/0", function=f"f{n}") for n in (2, 3))
    reason = "stages take turns"
    found = only([one, two], [two, one], allowed=[("collectives", "with collectives", reason)])
    assert (found.cls, reason in found.advice) == (DivergenceClass.DECLARED, True)


def issuing(*ops: str) -> tuple[Kernel, ...]:
    code = [f"torch.ops._c10d_functional.{op}_.default(buf{n}, '{op}', 'tp')" for n, op in enumerate(ops)]
    return (kernel("\n".join(code), name="call"),)


def test_code_that_issues_collectives_in_a_different_order_is_a_hang_below_bounds_that_follow_the_rank() -> None:
    ops = ("all_reduce", "all_gather_into_tensor")
    found = between(bound(0, kernels=issuing(*ops)), bound(4, kernels=issuing(*ops[::-1])))
    assert [(d.cls, d.layer) for d in found] == [
        (DivergenceClass.RANK_PARAMETRIC, Layer.LOWERED),
        (DivergenceClass.COLLECTIVES, Layer.KERNELS),
    ]


def test_code_that_issues_collectives_in_a_different_order_is_a_hang_below_a_declared_constant() -> None:
    def scaled(factor: int, *ops: str) -> CompileRecord:
        return compiled(call("mul", "%0", str(factor)), reduce("%1"), kernels=issuing(*ops))

    ops, allowed = ("all_reduce", "all_gather_into_tensor"), [("graph", "mul", "scale of the rank")]
    assert [d.cls for d in between(scaled(1, *ops), scaled(2, *ops[::-1]), allowed=allowed)] == [
        DivergenceClass.DECLARED,
        DivergenceClass.COLLECTIVES,
    ]
    assert only(scaled(1, *ops), scaled(2, *ops), allowed=allowed).cls == DivergenceClass.DECLARED


def test_an_inserted_op_that_is_declared_hides_nothing_behind_it() -> None:
    allowed = [("graph", "cos", "statistics of this rank")]
    extra = (call("cos", "%0"), call("mul", "%1", "2"))
    plain = call("mul", "%0", "2")
    same = compiled(*extra, call("add", "%2", "1")), compiled(plain, call("add", "%1", "1"))
    assert only(*same, allowed=allowed).cls == DivergenceClass.DECLARED
    found = between(compiled(*extra, call("add", "%2", "1")), compiled(plain, call("add", "%1", "99")), allowed=allowed)
    assert [d.is_red for d in found] == [False, True]
    assert "99" in found[1].title


def test_a_matmul_that_one_rank_padded_by_timing_is_explained() -> None:
    padded = lowered(
        call("torch.ops.aten.constant_pad_nd.default", "%0", "[0, 1, 0, 0]"), call("torch.ops.aten.mm", "%1")
    )
    found = only(padded, lowered(call("torch.ops.aten.mm", "%0")))
    assert found.cause == Cause.AUTOTUNE
    assert found.is_choice


PAD = call("torch.ops.aten.constant_pad_nd.default", "%0", "[0, 1, 0, 0]")


def both_ways(*forward: Node, backward: str, code: str = "") -> CompileRecord:
    graphs = (*lowered(*forward).graphs, graph(call(backward, "%0"), kind="backward"))
    return compiled(graphs=graphs, kernels=(kernel(code, name="call"),) if code else ())


def test_a_choice_in_the_forward_graph_explains_the_backward_graph_too() -> None:
    mm = call("torch.ops.aten.mm", "%0")
    found = only(both_ways(PAD, mm, backward="tanh"), both_ways(mm, backward="sigmoid"))
    assert (found.cause, found.is_choice) == (Cause.AUTOTUNE, True)
    plain = only(both_ways(mm, backward="tanh"), both_ways(mm, backward="sigmoid"))
    assert (plain.cause, plain.is_choice) == (Cause.COMPILER_PASS, False)


def test_a_pad_behind_the_first_difference_is_a_choice_as_well() -> None:
    mm, tanh = call("torch.ops.aten.mm", "%0"), call("tanh", "%0", value="f32[4, 8][8, 1]cpu")
    moved = tanh.model_copy(update={"value": "f32[4, 8][1, 4]cpu"})
    assert only(lowered(tanh, PAD, mm), lowered(moved, mm)).is_choice
    assert not only(lowered(tanh, PAD, mm), lowered(moved, PAD, mm)).is_choice


def test_a_choice_after_which_collectives_come_in_a_different_order_is_a_hang() -> None:
    calls = [
        f"torch.ops._c10d_functional.all_reduce_.default(buf{n}, '{op}', 'tp')" for n, op in ((0, "sum"), (1, "max"))
    ]
    codes = ["\n".join(order) for order in (calls, calls[::-1])]
    mm = call("torch.ops.aten.mm", "%0")
    ours, theirs = both_ways(PAD, mm, backward="tanh", code=codes[0]), both_ways(mm, backward="tanh", code=codes[1])
    found = between(ours, theirs)
    assert [(d.layer, d.cls, d.is_choice) for d in found] == [
        (Layer.LOWERED, DivergenceClass.CONTENT, True),
        (Layer.KERNELS, DivergenceClass.COLLECTIVES, False),
    ]
    assert only(ours, both_ways(mm, backward="tanh", code=codes[0] + "\nextern_kernels.mm(a, b)")).is_choice
    assert only(ours, both_ways(mm, backward="tanh")).is_choice  # a rank whose code was not logged


def test_a_collective_on_a_view_at_an_offset_that_follows_the_rank_is_the_same_collective() -> None:
    def sends(offset: int, op: str = "all_gather_into_tensor") -> tuple[Kernel, ...]:
        view = f"reinterpret_tensor(arg0_1, (4, 8), (8, 1), {offset})"
        return (kernel(f"buf0 = torch.ops._c10d_functional.{op}.default({view}, 2, 'tp')", name="call"),)

    assert only(bound(0, kernels=sends(0)), bound(4, kernels=sends(32))).cls == DivergenceClass.RANK_PARAMETRIC
    found = between(bound(0, kernels=sends(0)), bound(4, kernels=sends(32, "broadcast")))
    assert [d.cls for d in found] == [DivergenceClass.RANK_PARAMETRIC, DivergenceClass.COLLECTIVES]


def test_a_padded_matmul_that_moves_the_numbers_of_buffers_moves_no_collective() -> None:
    def reduces(first: int) -> str:
        return f"torch.ops._c10d_functional.all_reduce_coalesced.default([buf{first}, buf{first + 1}], 'sum', 'tp')"

    mm = call("torch.ops.aten.mm", "%0")
    padded = both_ways(PAD, mm, backward="tanh", code=reduces(2))
    assert only(padded, both_ways(mm, backward="tanh", code=reduces(1))).is_choice
