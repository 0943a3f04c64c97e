"""What torch keeps of a user's Triton kernels and custom ops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.forked import run_python
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


PROGRAM = """
import torch, triton
from tpcompile.torch_api import kernels

@triton.jit
def double(pointer):
    triton.language.store(pointer, 2 * triton.language.load(pointer))

seen, x = [], torch.ones(1)
with kernels.launches_seen(seen.append):
    double[(1,)](x)
double[(1,)](x)
print(x.item(), [kernel.__name__ for kernel in seen])
"""


def test_a_launch_in_the_interpreter_is_seen_inside_only_and_runs(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run_python([tmp_path / "program.py"], environ={**os.environ, "TRITON_INTERPRET": "1"})
    assert ended.stdout == "4.0 ['double']\n", ended.stderr


def test_what_is_raised_stops_the_launch() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(pointer):
        pass

    def refuse(launched: object) -> None:
        raise ValueError("not here")

    with torch_kernels.launches_seen(refuse), pytest.raises(ValueError, match="not here"):
        kernel[(1,)](None)
