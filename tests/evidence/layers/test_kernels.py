"""Launches of the generated code are compared before its text: what is split, why, and whether the ranks will hang."""

from __future__ import annotations

from typing import Any

from tests.evidence.samples import between, compiled, kernel, line, only
from tpcompile.evidence.records import CompileRecord, Divergence, DivergenceClass, Item, ItemKind, LaunchedGraph, Layer
from tpcompile.evidence.records.causes import Cause

LIMIT = "size limit: the kernel would hold too many nodes; try: config.max_fusion_size (64)"


def launch(says: str, writes: int = 1, **notes: str) -> Item:
    fields = {"launch": says, "writes": "" if says.startswith("extern") else str(writes)}
    return Item(kind=ItemKind.LAUNCH, about="launch", fields=fields, notes=notes, line=line(7))


def lowered_to(*launches: Item, code: str = "", phase: str = "forward", is_known: bool = True) -> CompileRecord:
    graph = LaunchedGraph(phase=phase, is_known=is_known, launches=launches)
    text = code or "\n".join(one.says for one in launches)
    return compiled(launched=(graph,), kernels=(kernel(text, phase=phase),))


def split(found: Divergence) -> tuple[list[str], bool]:
    """The two launches in the headline, and whether their reason and their rank are."""
    pair = found.title.partition(" are ")[0].split(" and ")
    return pair, LIMIT in found.title and "rank 1" in found.title


ONE = (launch("poi add relu sin"),)
TWO = (launch("poi add relu"), launch("poi sin", **{"from": "poi add relu", "apart": LIMIT}))


def test_a_kernel_that_is_two_on_one_rank_is_named_with_both_the_reason_and_the_users_line() -> None:
    found = only(lowered_to(*ONE), lowered_to(*TWO))
    assert (found.layer, found.cause, found.line) == (Layer.KERNELS, Cause.COMPILER_PASS, line(7))
    assert split(found) == (["poi add relu", "poi sin"], True)


def test_the_pair_is_one_of_the_ranks_with_more_launches() -> None:
    """The larger kernels of the first rank are apart too, on every rank: by what runs between them."""
    behind = {"from": "poi add relu sin", "apart": "library call: between them run 1 extern_kernels.mm"}
    fused = [*ONE, launch("extern_kernels.mm"), launch("poi mul cos", **behind)]
    rest = [launch("poi mul"), launch("poi cos", **{"from": "poi mul", "apart": LIMIT})]
    found = only(lowered_to(*fused), lowered_to(*TWO, launch("extern_kernels.mm"), *rest))
    assert split(found) == (["poi add relu", "poi sin"], True)


def test_a_part_that_all_ranks_have_is_apart_from_one_that_only_some_have() -> None:
    norm = launch("red norm")
    fused = [norm, launch("red add norm")]
    found = only(
        lowered_to(*fused),
        lowered_to(norm, launch("poi add"), launch("red norm", **{"from": "poi add", "apart": LIMIT})),
    )
    assert split(found) == (["poi add", "red norm"], True)


def test_a_pair_that_only_some_ranks_have_comes_before_what_follows_a_kernel_on_all() -> None:
    behind = launch("extern_kernels.mm", **{"from": "poi add relu", "apart": "library call: it is one"})
    found = only(lowered_to(*ONE, launch("extern_kernels.mm")), lowered_to(TWO[0], behind, TWO[1]))
    assert split(found) == (["poi add relu", "poi sin"], True)


def test_a_library_call_behind_a_kernel_explains_nothing() -> None:
    behind = launch("extern_kernels.mm", **{"from": "poi add relu", "apart": "library call: it is one"})
    found = only(lowered_to(*ONE, launch("extern_kernels.mm")), lowered_to(TWO[0], launch("poi sin"), behind))
    assert [group.item and group.item.says for group in found.groups] == ["poi add relu sin", "poi add relu"]


def test_a_kernel_that_writes_one_buffer_more_is_named_with_both_numbers() -> None:
    """What runs behind it is apart from it on every rank, and explains nothing."""
    behind = launch("extern_kernels.mm", **{"from": "poi add relu", "apart": "library call: it is one"})
    found = only(lowered_to(launch("poi add relu"), behind), lowered_to(launch("poi add relu", writes=2), behind))
    writes = [group.item and group.item.fields["writes"] for group in found.groups]
    assert (writes, found.line) == (["1", "2"], line(7))


def test_without_the_launches_the_text_of_the_code_is_all_there_is() -> None:
    """Negative control."""
    found = only(lowered_to(*ONE, is_known=False), lowered_to(*TWO, is_known=False))
    assert (found.layer, LIMIT in found.title) == (Layer.KERNELS, False)


def test_a_reason_that_is_worded_differently_is_no_difference() -> None:
    other = launch("poi sin", **{"from": "poi add relu", "apart": "timing: 3.1 us against 2.9 us"})
    assert between(lowered_to(*TWO), lowered_to(TWO[0], other)) == ()


def test_launches_that_one_rank_does_not_know_are_not_compared() -> None:
    """Its code came from a cache that was filled without a recorder."""
    unknown = lowered_to(is_known=False, code="\n".join(one.says for one in ONE))
    assert between(lowered_to(*ONE), unknown) == ()
    assert between(lowered_to(*ONE), compiled(kernels=unknown.kernels)) == ()


def test_a_template_on_one_rank_is_a_choice_by_timing() -> None:
    found = only(lowered_to(launch("extern_kernels.mm")), lowered_to(launch("tem mm")))
    assert (found.cause, found.is_choice) == (Cause.AUTOTUNE, True)


def test_a_declared_difference_of_the_launches_declares_their_code() -> None:
    why = (Layer.KERNELS, "launch :: poi", "rank 1 has an older driver")
    (found,) = between(lowered_to(*ONE), lowered_to(*TWO), allowed=(why,))
    assert found.cls == DivergenceClass.DECLARED
    other = (Layer.KERNELS, "poi tan", "does not occur")
    assert only(lowered_to(*ONE), lowered_to(*TWO), allowed=(other,)).cls == DivergenceClass.CONTENT


def issuing(*ops: str) -> dict[str, Any]:
    return {"code": "\n".join(f"torch.ops._c10d_functional.{op}_.default(buf0, 'sum', 'tp')" for op in ops)}


def test_collectives_in_a_different_order_are_a_hang_whatever_is_fused() -> None:
    pair = ("all_reduce", "all_gather_into_tensor")
    first, second = lowered_to(*ONE, **issuing(*pair)), lowered_to(*TWO, **issuing(*pair[::-1]))
    assert only(first, second).cls == DivergenceClass.COLLECTIVES
    assert only(first, lowered_to(*TWO, **issuing(*pair))).cls == DivergenceClass.CONTENT


def by_size(*buffers: str) -> dict[str, Any]:
    op = "torch.ops.tpcompile.all_reduce_by_size.default"
    issued = "torch.ops._c10d_functional.all_gather_into_tensor.default(buf9, 2, 'tp')"
    return {"code": "\n".join(f"{op}({one}, '64:two_shot', 'tp')" if one != "gather" else issued for one in buffers)}


def test_a_sum_by_size_is_a_collective_of_the_generated_code() -> None:
    first = lowered_to(*ONE, **by_size("buf0", "gather"))
    assert only(first, lowered_to(*TWO, **by_size("gather", "buf0"))).cls == DivergenceClass.COLLECTIVES
    assert only(first, lowered_to(*TWO, **by_size("gather"))).cls == DivergenceClass.COLLECTIVES
    assert only(first, lowered_to(*TWO, **by_size("buf7", "gather"))).cls == DivergenceClass.CONTENT


def test_the_backward_follows_the_forward() -> None:
    def both(launches: tuple[Item, ...]) -> CompileRecord:
        graphs = [LaunchedGraph(phase=phase, is_known=True, launches=launches) for phase in ("forward", "backward")]
        kernels = [kernel(repr(launches), phase=phase) for phase in ("forward", "backward")]
        return compiled(launched=tuple(graphs), kernels=tuple(kernels))

    assert only(both(ONE), both(TWO)).where.endswith("(forward launches)")
