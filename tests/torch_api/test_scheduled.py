"""What tests/fusion/test_zoo.py shows on whole programs needs these names of Inductor."""

from __future__ import annotations

import inspect

import pytest

from tpcompile.torch_api import scheduled


@pytest.mark.parametrize(
    "name", ["get_nodes", "get_operation_names", "get_read_write_buffer_accesses", "is_foreach", "is_template"]
)
def test_a_node_says_what_it_is(name: str) -> None:
    assert callable(getattr(scheduled._scheduler.BaseSchedulerNode, name))


@pytest.mark.parametrize(
    "name", ["MultiOutput", "_WaitKernel", "_CollectiveKernel", "DeviceCopy", "UserDefinedTritonKernel"]
)
def test_kinds_of_extern_kernels_are_classes(name: str) -> None:
    assert isinstance(getattr(scheduled._ir, name), type)


def test_a_group_of_nodes_is_a_class_and_holds_them() -> None:
    create = scheduled._scheduler.GroupedSchedulerNode.create
    assert "snodes" in inspect.signature(create).parameters


def test_a_group_is_its_nodes_and_any_other_node_itself() -> None:
    group = object.__new__(scheduled._scheduler.GroupedSchedulerNode)
    group.snodes = ["first", "second"]
    assert list(scheduled.ungrouped([group, "third"])) == ["first", "second", "third"]


def test_a_buffer_of_a_fused_node_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor stops at 10^9 elements: 4.0 GB for rows of 4.3 GB, seen beside the DRAM counters of an H100."""
    monkeypatch.setattr(scheduled, "_bytes_of_buffer", {"buf0": 2**32, "buf1": 8}.__getitem__)
    capped = {"buf0": 4 * 10**9, "buf1": 8}
    assert scheduled._numbers(capped, is_fused=True) == {"buf0": 2**32, "buf1": 8}
    assert scheduled._numbers(capped, is_fused=False) == capped
