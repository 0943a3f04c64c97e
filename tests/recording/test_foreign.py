"""Custom ops and user Triton kernels are found in graphs, by name."""

from __future__ import annotations

import pytest

from tpcompile.evidence.records import CompileRecord, Graph, Node, UserLine
from tpcompile.recording.foreign import foreign_ops

LINE = UserLine(file="/app/model.py", line=7)


def compiled(target: str, **kwargs: str) -> list[CompileRecord]:
    """A compile whose graph calls one op."""
    node = Node(scope="", op="call", target=target, kwargs=tuple(kwargs.items()), line=LINE)
    return [CompileRecord(compile_id="0/0", graphs=(Graph(kind="dynamo", nodes=(node,)),))]


@pytest.mark.parametrize("target", ["torch.ops.mylib.fused_norm", "torch.ops.mylib.fused_norm.default"])
def test_a_custom_op_is_named_with_its_line(target: str) -> None:
    (found,) = foreign_ops(compiled(target))
    assert found.text.startswith("mylib::fused_norm") and found.line == LINE


@pytest.mark.parametrize(
    "target",
    ["torch.ops.aten.mm.default", "torch.ops._c10d_functional.all_reduce", "torch.relu", "method view",
     "torch.ops.higher_order.autograd_function_apply"],
)  # fmt: skip
def test_ops_of_torch_itself_are_not_foreign(target: str) -> None:
    assert foreign_ops(compiled(target)) == ()


def test_fused_symmetric_memory_ops_are_foreign_they_assume_things_about_tp() -> None:
    assert foreign_ops(compiled("torch.ops.symm_mem.fused_all_gather_matmul.default"))


def test_a_triton_kernel_is_named_by_its_function() -> None:
    target = "torch.ops.higher_order.triton_kernel_wrapper_functional"
    (found,) = foreign_ops(compiled(target, kernel="'app.kernels.qkv_norm'"))
    assert found.about == "app.kernels.qkv_norm"
    (found,) = foreign_ops(compiled(target, kernel_idx="3"))  # in a log
    assert found.about == "triton kernel"


def test_a_launch_without_a_name_in_a_lowered_graph_is_left_to_the_call_that_dynamo_saw() -> None:
    (record,) = compiled("torch.ops.higher_order.triton_kernel_wrapper_functional", kernel_idx="3")
    lowered = record.graphs[0].model_copy(update={"kind": "forward"})
    assert foreign_ops([record.model_copy(update={"graphs": (lowered,)})]) == ()
