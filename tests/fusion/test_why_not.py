"""Pairs of launches that share a buffer: why they are two kernels, in plain words."""

from __future__ import annotations

import re

import pytest

from tpcompile.evidence.records import UserLine
from tpcompile.fusion.manifest import graph_manifest
from tpcompile.fusion.manifest_records import Decisions, GraphManifest, Node, Pair, Realized, Totals
from tpcompile.fusion.reasons import Boundary
from tpcompile.fusion.why_not import Missed, missed_fusions

CODE = """# AOT ID: ['0_inference']
async_compile = AsyncCompile()
triton_poi_fused_a_0 = async_compile.triton('triton_poi_fused_a_0', '''
a
''', device_str='cuda')

triton_red_fused_b_1 = async_compile.triton('triton_red_fused_b_1', '''
b
''', device_str='cuda')

def call(args):
    arg0_1, = args
    buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
    triton_poi_fused_a_0.run(arg0_1, buf0, 8, stream=stream0)
{between}
    triton_red_fused_b_1.run(buf0, buf9, 8, stream=stream0)
    return (buf9, )
"""


def node(name: str, kind: str, reads: dict[str, int], writes: dict[str, int], line: int = 1) -> Node:
    return Node(
        name=name,
        kind=kind,
        parts=(name,),
        ops=(f"aten.{name}",),
        body={},
        loops="8",
        reads=reads,
        writes=writes,
        device="cuda",
        fx=(name,),
        lines=(UserLine(file="model.py", line=line),),
    )


def graph(*pairs: Pair, outputs: tuple[str, ...] = ("buf9",)) -> GraphManifest:
    """Two kernels, of which the second reads what the first writes."""
    nodes = (
        node("op0", "pointwise", {"arg0_1": 32}, {"buf0": 32}),
        node("op1", "reduction", {"buf0": 32}, {"buf9": 4}, line=2),
    )
    return graph_manifest(CODE.format(between=""), decisions(nodes, pairs, outputs), compile_id="0/0")


def decisions(nodes: tuple[Node, ...], pairs: tuple[Pair, ...], outputs: tuple[str, ...]) -> Decisions:
    return Decisions(
        before=nodes,
        after=nodes,
        pairs=pairs,
        fused=(),
        num_rounds=1,
        ops=Totals(kernels=2, bytes=100),
        outputs=outputs,
    )


def pair(*refused: str, is_allowed: bool | None = None) -> Pair:
    return Pair(first="op0", second="op1", score={"memory_score": 32}, is_allowed=is_allowed, refused=refused)


def only(found: GraphManifest) -> Missed:
    assert found.is_aligned, found.why_not_aligned
    (one,) = missed_fusions(found)
    return one


def test_a_logged_reason_comes_with_the_score_the_lines_and_what_one_kernel_would_save() -> None:
    found = only(graph(pair("exceeds max fusion")))
    assert found.reason.boundary is Boundary.SIZE
    assert found.logged == ("exceeds max fusion",)
    assert found.score == {"memory_score": 32}
    assert [line.line for line in found.lines] == [1, 2]
    assert found.saved_bytes == 64  # buf0 need not be written, nor read


def two_readers(second_reads: int, second_body: dict[str, int]) -> Missed:
    """Two kernels that read an input of 32 bytes, of which the second reads so many, in no common order."""
    first = node("op0", "pointwise", {"arg0_1": second_reads}, {"buf0": 32})
    second = node("op1", "reduction", {"arg0_1": second_reads}, {"buf9": 4}).model_copy(update={"body": second_body})
    made = decisions((first, second), (pair("no shared data"),), ("buf0", "buf9"))
    found = made.model_copy(update={"sizes": {"arg0_1": 32}})
    code = CODE.format(between="").replace("run(buf0, buf9", "run(arg0_1, buf9")
    return only(graph_manifest(code, found, compile_id="0/0"))


@pytest.mark.parametrize(
    ("reads", "body", "says", "saved", "has_remedy"),
    [
        (16, {}, "one pass would save no read", 0, True),
        (16, {"reduction": 1}, "one pass would save no read", 0, False),
        (32, {"reduction": 1}, "in different orders", 32, False),
    ],
    ids=["different parts", "different parts, a reduction", "all of it"],
)
def test_of_two_readers_the_bytes_are_those_that_the_reason_allows(
    reads: int, body: dict[str, int], says: str, saved: int, has_remedy: bool
) -> None:
    found = two_readers(reads, body)
    assert found.reason.text.endswith(says)
    assert (found.saved_bytes, "aggressive_fusion" in found.reason.remedy) == (saved, has_remedy)


def test_a_buffer_that_the_graph_returns_is_written_in_any_case() -> None:
    assert only(graph(pair("exceeds max fusion"), outputs=("buf0", "buf9"))).saved_bytes == 32


def test_of_several_tries_the_reason_is_not_the_order() -> None:
    found = only(graph(pair("memory deps did not match", "node1 must go before node2")))
    assert found.reason.boundary is Boundary.INDEXING


@pytest.mark.parametrize(
    ("pairs", "boundary"),
    [
        ((pair(is_allowed=True),), Boundary.BACKEND),
        ((pair(is_allowed=False),), Boundary.CHOICES),
        ((pair(is_allowed=None),), Boundary.NOT_TRIED),
        ((), Boundary.NOT_TRIED),
    ],
    ids=["silent", "choices", "choices not asked", "not tried"],
)
def test_what_was_refused_in_silence_and_what_was_not_tried_are_said(
    pairs: tuple[Pair, ...], boundary: Boundary
) -> None:
    assert only(graph(*pairs)).reason.boundary is boundary


@pytest.mark.parametrize(
    ("code", "kind", "boundary", "says"),
    [
        (
            "    torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')",
            "collective",
            Boundary.COLLECTIVE,
            "between them run 1 all_reduce_",
        ),
        (
            "    torch.ops.mine.op.default(buf0)",
            "extern",
            Boundary.EXTERN,
            "between them run 1 torch.ops.mine.op.default",
        ),
    ],
)
def test_what_lies_between_two_launches_is_the_boundary(code: str, kind: str, boundary: Boundary, says: str) -> None:
    nodes = (
        node("op0", "pointwise", {"arg0_1": 32}, {"buf0": 32}),
        node("op2", kind, {"buf0": 32}, {"buf1": 32}),
        node("op1", "reduction", {"buf0": 32, "buf1": 32}, {"buf9": 4}),
    )
    logged = pair("intermediate nodes between node1 & node2")
    found = graph_manifest(CODE.format(between=code), decisions(nodes, (logged,), ("buf9",)), compile_id="0/0")
    assert found.is_aligned, found.why_not_aligned
    one = next(one for one in missed_fusions(found) if one.places == (0, 2))
    assert one.reason.boundary is boundary
    assert one.reason.text == says


def test_a_custom_op_is_named_with_what_to_do() -> None:
    nodes = (node("op0", "pointwise", {"arg0_1": 32}, {"buf0": 32}), node("op2", "extern", {"buf0": 32}, {"buf9": 4}))
    code = CODE.format(between="").replace("triton_red_fused_b_1.run(", "torch.ops.mine.op.default(")
    one = only(graph_manifest(code, decisions(nodes, (), ("buf9",)), compile_id="0/0"))
    assert one.reason.boundary is Boundary.CUSTOM
    assert one.reason.remedy.endswith("torch's ops")


def test_launches_that_could_not_be_matched_have_no_reasons() -> None:
    nodes = (node("op0", "pointwise", {}, {}),)
    found = graph_manifest(CODE.format(between=""), decisions(nodes, (), ()), compile_id="0/0")
    assert re.search(r"2 kernel, .* 1 kernel$", found.why_not_aligned)
    assert missed_fusions(found) == ()


def test_behind_a_wait_the_result_of_a_collective_is_the_same_buffer() -> None:
    """The wait gives it a new name; without it the pair shares no buffer, and is not listed at all."""
    between = """    torch.ops._c10d_functional.all_gather_into_tensor.default(buf0, 2, '0')
    torch.ops._c10d_functional.wait_tensor.default(buf1)"""
    nodes = (
        node("op0", "pointwise", {"arg0_1": 32}, {"buf0": 32}),
        node("op1", "collective", {"buf0": 32}, {"buf1": 64}),
        node("op2", "wait", {"buf0": 32, "buf1": 64}, {"buf2": 0, "buf3": 64}),
        node("op3", "reduction", {"buf3": 64}, {"buf9": 4}),
    )
    found = graph_manifest(CODE.format(between=between), decisions(nodes, (), ("buf9",)), compile_id="0/0")
    assert found.is_aligned, found.why_not_aligned
    (gathered,) = [one for one in missed_fusions(found) if one.places == (1, 3)]
    assert gathered.shared == ("buf1",)
    assert gathered.saved_bytes == 128
    assert gathered.reason.boundary is Boundary.COLLECTIVE
    assert found.launches[3].reads == {"buf3": 64}  # the manifest itself stays as it was


def staged(*, second_made: str) -> GraphManifest:
    """Two reductions, the second of the results of the first."""
    first = node("op0", "reduction", {"arg0_1": 64}, {"buf0": 32}).model_copy(
        update={"made": ("mean",), "body": {"reduction": 1}}
    )
    second = node("op1", "reduction", {"buf0": 32}, {"buf9": 4}).model_copy(
        update={"made": (second_made,), "body": {"reduction": 1}}
    )
    logged = pair("numel/rnumel mismatch (reduce) (512, 1), (32768, 512)")
    return graph_manifest(CODE.format(between=""), decisions((first, second), (logged,), ("buf9",)), compile_id="0/0")


def test_two_stages_of_one_reduction_are_told_from_two_reductions() -> None:
    found = only(staged(second_made="mean")).reason
    assert found.boundary is Boundary.STAGES
    assert "config.triton.cooperative_reductions" in found.remedy
    assert only(staged(second_made="sum_1")).reason.boundary is Boundary.SHAPE


@pytest.mark.parametrize(
    ("buffer", "logged", "says"),
    [
        ("buf0", "no shared data", "it was made in memory because of its 5 reads, more than 4"),
        ("buf7", "no shared data", "than the first writes"),
        ("buf0", "exceeds max fusion", "the kernel would hold too many nodes"),
    ],
)
def test_why_a_buffer_was_made_is_said_where_the_loops_over_it_do_not_fit(buffer: str, logged: str, says: str) -> None:
    made = graph(pair(logged))
    assert made.decisions is not None
    realized = Realized(buffer=buffer, setting="realize_reads_threshold", text="5 reads, more than 4")
    known = made.decisions.model_copy(update={"realized": (realized,)})
    found = only(made.model_copy(update={"decisions": known})).reason
    assert found.text.endswith(says)
    assert ("realize_reads_threshold" in found.remedy) == says.endswith("more than 4")
