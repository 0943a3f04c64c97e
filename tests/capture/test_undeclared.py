"""Custom ops and user Triton kernels are denied unless declared."""

from __future__ import annotations

import pytest

from tpcompile.capture import undeclared
from tpcompile.capture.undeclared import undeclared_ops
from tpcompile.evidence.records import CompileRecord, Graph, Node, UserLine
from tpcompile.torch_api import compiler as compat

LINE = UserLine(file="/app/model.py", line=7)


def compiled(target: str, **kwargs: str) -> list[CompileRecord]:
    """A compile whose graph calls one op."""
    node = Node(scope="", op="call", target=target, kwargs=tuple(kwargs.items()), line=LINE)
    return [CompileRecord(compile_id="0/0", graphs=(Graph(kind="dynamo", nodes=(node,)),))]


@pytest.mark.parametrize("target", ["torch.ops.mylib.fused_norm", "torch.ops.mylib.fused_norm.default"])
def test_a_custom_op_is_named_with_its_line(target: str) -> None:
    (found,) = undeclared_ops(compiled(target), declared=())
    assert found.text.startswith("mylib::fused_norm") and found.line == LINE


def test_a_declared_op_is_not_reported() -> None:
    assert undeclared_ops(compiled("torch.ops.mylib.fused_norm"), declared=["mylib::fused_norm"]) == ()


def test_declaring_one_op_does_not_allow_another() -> None:
    assert undeclared_ops(compiled("torch.ops.mylib.other"), declared=["mylib::fused_norm"])


@pytest.mark.parametrize(
    "target",
    ["torch.ops.aten.mm.default", "torch.ops._c10d_functional.all_reduce", "torch.relu", "method view",
     "torch.ops.higher_order.autograd_function_apply"],
)  # fmt: skip
def test_ops_of_torch_itself_are_not_foreign(target: str) -> None:
    assert undeclared_ops(compiled(target), declared=()) == ()


def test_fused_symmetric_memory_ops_are_foreign_they_assume_things_about_tp() -> None:
    assert undeclared_ops(compiled("torch.ops.symm_mem.fused_all_gather_matmul.default"), declared=())


def test_a_triton_kernel_is_named_by_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "triton_kernel_name", {3: "app.kernels.qkv_norm"}.__getitem__)
    target = "torch.ops.higher_order.triton_kernel_wrapper_functional"
    (found,) = undeclared_ops(compiled(target, kernel_idx="3"), declared=())
    assert found.text.startswith("app.kernels.qkv_norm")
    assert undeclared_ops(compiled(target, kernel_idx="3"), declared=["qkv_norm"]) == ()


def test_the_list_of_torchs_namespaces_holds_no_user_namespace() -> None:
    assert "symm_mem" not in undeclared.TORCH_NAMESPACES and "tpcompile_faults" not in undeclared.TORCH_NAMESPACES
