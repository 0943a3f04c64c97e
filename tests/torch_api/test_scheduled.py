"""What tests/fusion/test_zoo.py shows on whole programs needs these names of Inductor."""

from __future__ import annotations

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
