"""A product with GELU in its epilogue: which form of GELU where, and that Inductor calls the operator as it is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._inductor.decomposition import decompositions
from torch._inductor.lowering import fallbacks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tpcompile.torch_api.epilogues import gelu_of_product

aten = torch.ops.aten
FUSED = aten._addmm_activation.default


def arguments(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.linspace(-3, 3, n, device=device).view(s) for n, s in ((4, (4,)), (6, (3, 2)), (8, (2, 4))))  # type: ignore[return-value]


def test_on_a_cpu_it_is_the_tanh_form_and_the_operator_is_not() -> None:
    """On a GPU the operator is; the certificate of a GPU has the numbers."""
    bias_f, x_NI, weight_If = arguments()
    product_Nf = torch.addmm(bias_f, x_NI, weight_If)
    tanh_Nf, erf_Nf = F.gelu(product_Nf, approximate="tanh"), F.gelu(product_Nf)
    torch.testing.assert_close(gelu_of_product(bias_f, x_NI, weight_If), tanh_Nf)
    torch.testing.assert_close(FUSED(bias_f, x_NI, weight_If, use_gelu=True), erf_Nf)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(tanh_Nf, erf_Nf)


@pytest.mark.parametrize(("device", "ops"), [("cuda", [FUSED]), ("cpu", [aten.addmm.default, aten.gelu.default])])
def test_on_a_gpu_it_is_one_operator(device: str, ops: list[object]) -> None:
    with FakeTensorMode():
        graph = make_fx(gelu_of_product)(*arguments(device)).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == ops


def test_inductor_takes_apart_gelu_and_calls_the_operator_as_it_is() -> None:
    assert aten.gelu.default in decompositions
    assert FUSED not in decompositions and FUSED in fallbacks
