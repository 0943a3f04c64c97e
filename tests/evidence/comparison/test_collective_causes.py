"""Collectives that ranks issue differently -> the cause that is named, each with its line."""

from __future__ import annotations

import pytest

from tests.evidence.samples import (
    call,
    collective,
    compiled,
    line,
    only,
    reduce,
)
from tpcompile.evidence.records import CompileRecord, DivergenceClass
from tpcompile.evidence.records.causes import Cause

FUNCTIONAL = "torch.ops._c10d_functional."


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"reduce_op": "max"}, Cause.REDUCE_OP),
        ({"src": "1"}, Cause.BROADCAST_SOURCE),
        ({"group": "dp"}, Cause.GROUP),
        ({"dtype": "bf16"}, Cause.COLLECTIVE_SIZES),
        ({"shape": "[4, 16]"}, Cause.COLLECTIVE_SIZES),
        ({"waited": False}, Cause.UNWAITED),
        ({"op": "all_gather_into_tensor"}, Cause.EXTRA_COLLECTIVE),
    ],
)
def test_the_field_of_a_collective_that_differs_is_the_cause(
    phase: str, change: dict[str, object], cause: Cause
) -> None:
    found = only(
        compiled(collectives=(collective(phase=phase),)), compiled(collectives=(collective(phase=phase, **change),))
    )
    assert (found.cause, found.cls) == (cause, DivergenceClass.COLLECTIVES)


@pytest.mark.parametrize(("phase", "cause"), [("forward", Cause.ORDER_FORWARD), ("backward", Cause.ORDER_BACKWARD)])
def test_the_same_collectives_in_a_different_order_are_an_order(phase: str, cause: Cause) -> None:
    one, two = collective(phase=phase), collective(phase=phase, reduce_op="max")
    assert only(compiled(collectives=(one, two)), compiled(collectives=(two, one))).cause == cause


def test_the_source_of_a_broadcast_is_named() -> None:
    def sends(src: str) -> CompileRecord:
        issued = collective(op="broadcast", reduce_op="", src=src)
        return compiled(call(FUNCTIONAL + "broadcast", "%0", src, "group:tp"), collectives=(issued,))

    found = only(sends("0"), sends("1"))
    sources = [side.item.fields["src"] for side in found.groups if side.item]
    assert (found.cause, sources) == (Cause.BROADCAST_SOURCE, ["0", "1"])


def test_so_it_is_in_a_program_whose_collectives_were_not_read() -> None:
    def sends(src: str) -> CompileRecord:
        return compiled(call(FUNCTIONAL + "broadcast", "%0", src, "group:tp"), collectives=())

    found = only(sends("0"), sends("1"))
    assert (found.cause, found.cls) == (Cause.BROADCAST_SOURCE, DivergenceClass.COLLECTIVES)


def test_an_extra_collective_is_named_before_the_branch_that_holds_it() -> None:
    more = compiled(
        call("mul", "%0", "2"), call("torch.relu", "%1"), reduce("%2"), reduce("%3", at=9),
        collectives=(collective(), collective()),
    )  # fmt: skip
    found = only(compiled(), more)
    assert (found.cause, found.cls) == (Cause.EXTRA_COLLECTIVE, DivergenceClass.COLLECTIVES)


def test_other_split_sizes_are_a_hang_although_the_shape_is_equal() -> None:
    def split(sizes: str) -> CompileRecord:
        return compiled(call(FUNCTIONAL + "all_to_all_single", "%0", sizes, "[4, 4]", "group:tp"), collectives=())

    found = only(split("[4, 4]"), split("[2, 6]"))
    assert (found.cause, found.cls) == (Cause.COLLECTIVE_SIZES, DivergenceClass.COLLECTIVES)


@pytest.mark.parametrize("value", ["f32[4, 16][16, 1]cpu", "bf16[4, 8][8, 1]cpu"])
@pytest.mark.parametrize("is_seen", [True, False], ids=["collectives differ", "collectives not observed"])
def test_a_collective_of_a_different_shape_or_dtype_in_the_graph_is_a_hang(value: str, is_seen: bool) -> None:
    def with_value(text: str, shape: str) -> CompileRecord:
        reduced = reduce("%0").model_copy(update={"value": text})
        return compiled(reduced, collectives=(collective(shape=shape),) if is_seen else ())

    found = only(with_value("f32[4, 8][8, 1]cpu", "[4, 8]"), with_value(value, "[4, 16]"))
    assert (found.cause, found.cls) == (Cause.COLLECTIVE_SIZES, DivergenceClass.COLLECTIVES)


def test_a_result_that_one_rank_drops_is_content_and_named() -> None:
    def reads(operand: str, *, used: bool) -> CompileRecord:
        return compiled(reduce("%0"), call("mul", operand, "2"), collectives=(collective(used=used),))

    found = only(reads("%1", used=True), reads("%0", used=False))
    assert (found.cause, found.cls) == (Cause.UNUSED_RESULT, DivergenceClass.CONTENT)


@pytest.mark.parametrize("dropping", [0, 1])
def test_the_rank_that_drops_a_result_is_last_with_the_line_of_the_collective(dropping: int) -> None:
    def reads(operand: str, *, used: bool) -> CompileRecord:
        return compiled(reduce("%0"), call("mul", operand, "2"), collectives=(collective(used=used, line=line(42)),))

    ranks = [reads("%1", used=True), reads("%1", used=True), reads("%1", used=True)]
    ranks[dropping] = reads("%0", used=False)
    found = only(*ranks)
    assert found.groups[-1].ranks == (dropping,)
    assert found.line == line(42)


def test_ranks_that_drop_results_of_different_collectives_are_distinguished_by_the_node() -> None:
    def drops(first: bool) -> CompileRecord:
        issued = (collective(used=not first), collective(used=first))
        return compiled(reduce("%0"), reduce("%0"), call("mul", "%2" if first else "%1", "2"), collectives=issued)

    found = only(drops(True), drops(False))
    assert found.cause == Cause.UNUSED_RESULT
    assert [group.item.text.partition(" :: ")[0] for group in found.groups if group.item] == ["%3", "%3"]
