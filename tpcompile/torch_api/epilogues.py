"""A matrix product that ends in an activation: a private operator, seen on torch 2.11.0 and 2.13.0.

    name                       why
    aten::_addmm_activation    cuBLASLt adds the bias and applies GELU before it stores the product

Its GELU is the tanh form on a GPU and the erf form on a CPU. Inductor has no decomposition of it and calls it.

`tests/torch_api/test_epilogues.py` fails when one of this changes.
"""

# N rows, I input features, f output features
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu_of_product(bias_f: Tensor, x_NI: Tensor, weight_If: Tensor) -> Tensor:
    """gelu(x @ weight + bias) in the tanh form -> [N, f]; on a GPU in one kernel."""
    if x_NI.is_cuda:
        out_Nf = torch.ops.aten._addmm_activation(bias_f, x_NI, weight_If, use_gelu=True)
    else:
        out_Nf = F.gelu(torch.addmm(bias_f, x_NI, weight_If), approximate="tanh")
    return out_Nf
