"""What torch keeps of a user's Triton kernels and custom ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tpcompile.fastpath.source import python_function
from tpcompile.torch_api import kernels as torch_kernels


def test_a_users_triton_kernel_is_found_by_its_index() -> None:
    triton = pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    @triton.jit
    def my_kernel(pointer, size):
        pass

    configs = [triton.Config({}, num_warps=1)]
    kernels = [my_kernel, triton.autotune(configs=configs, key=[])(my_kernel)]
    found = [torch_kernels.triton_kernel(kernel_side_table.add_kernel(kernel)) for kernel in kernels]
    assert [python_function(kernel) for kernel in found] == [my_kernel.fn] * 2


def test_a_custom_op_has_its_name_and_a_function_none() -> None:
    @torch.library.custom_op("tpcompile_tests::named", mutates_args=())
    def named(x: Tensor) -> Tensor:
        return x.clone()

    assert torch_kernels.custom_op_name(named) == "tpcompile_tests::named"
    assert torch_kernels.custom_op_name(test_a_custom_op_has_its_name_and_a_function_none) == ""
