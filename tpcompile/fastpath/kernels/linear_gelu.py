"""Normalised activations -> hidden features: matrix product, bias and GELU (tanh) in one kernel of cuBLASLt."""

# I input features, f hidden features of this rank
from __future__ import annotations

import torch
from torch import Tensor

from tpcompile.errors import FastPathError
from tpcompile.fastpath import plain
from tpcompile.fastpath.declare import fast_path
from tpcompile.fastpath.kernels.op import DTYPES, kernel_op
from tpcompile.fastpath.registry import TpSupport
from tpcompile.torch_api.epilogues import gelu_of_product

_CERTIFIED = (torch.bfloat16, torch.float16)
"""Without float32, where its GELU has 12 times the error of the plain code, seen on an H100 near -3."""


@kernel_op("tpcompile::linear_gelu")
def linear_gelu(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> Tensor:
    """[..., I], [f, I], [f] -> [..., f], contiguous.

    Raises FastPathError for element types and shapes that it cannot take.
    """
    _check(x_I, weight_fI, bias_f)
    rows_I = x_I.reshape(-1, x_I.shape[-1])
    out_f = gelu_of_product(bias_f, rows_I, weight_fI.t())
    return out_f.view(*x_I.shape[:-1], weight_fI.shape[0])


def _check(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> None:
    dtypes = {x_I.dtype, weight_fI.dtype, bias_f.dtype}
    if len(dtypes) > 1 or x_I.dtype not in DTYPES:
        found = ", ".join(sorted(map(str, dtypes)))
        raise FastPathError(f"linear_gelu: tensors are {found}; all must be float32, bfloat16 or float16")
    if weight_fI.shape[1:] != x_I.shape[-1:] or bias_f.shape != weight_fI.shape[:1]:
        shapes = " and ".join(str(list(tensor.shape)) for tensor in (weight_fI, bias_f))
        raise FastPathError(
            f"linear_gelu: x is {x_I.shape[-1]} wide, weight and bias are {shapes}; "
            f"[f, {x_I.shape[-1]}] and [f] are needed"
        )


@linear_gelu.register_fake
def _(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> Tensor:
    return x_I.new_empty(*x_I.shape[:-1], weight_fI.shape[0])


@fast_path("linear_gelu_tanh", replaces=plain.linear_gelu_tanh, tp=TpSupport.PER_TOKEN, dtypes=_CERTIFIED)
def linear_gelu_tanh(x_I: Tensor, weight_fI: Tensor, bias_f: Tensor) -> Tensor:
    """As `plain.linear_gelu_tanh`, in one kernel."""
    return linear_gelu(x_I, weight_fI, bias_f)
