"""A pinned backend of attention: the same numbers, its op in the code, an error where it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tpcompile.errors import ConfigError
from tpcompile.nn.attention import attend

FLASH = "_scaled_dot_product_flash_attention_for_cpu"


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 6, heads, 8, generator=generator, dtype=dtype) for heads in (4, 2, 2))
    return q, (k, v)


def attended(backend: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    form = {"mask": None, "causal": True, "grouped": True} | options
    return attend(*given(dtype), **form, backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "is_flash"), [("auto", True), ("flash", True), ("math", False)])
def test_compiled_code_has_the_backend_in_one_graph_and_the_numbers_of_auto(backend: str, is_flash: bool) -> None:
    torch.compiler.reset()
    found, (code,) = run_and_get_code(torch.compile(attend, fullgraph=True), *given(), backend=backend, mask=None,
                                      causal=True, grouped=True)  # fmt: skip
    assert (FLASH in code) == is_flash
    assert torch.allclose(found, attended("auto"), atol=1e-6)


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_eager_takes_it_and_leaves_the_choice_as_it_was(backend: str) -> None:
    before = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    assert torch.allclose(attended(backend), attended("auto"), atol=1e-6)
    assert (torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


def test_one_that_cannot_take_the_tensors_is_named_with_them() -> None:
    named = r"attention_backend=cudnn cannot take torch.float32 \[2, 4, 6, 8\] and \[2, 2, 6, 8\] on cpu; choose"
    with pytest.raises(ConfigError, match=named):
        attended("cudnn")
    with pytest.raises(ConfigError, match=r"attention_backend=efficient .*cpu.*mask"):
        attended("efficient", causal=False, mask=torch.ones(6, 6, dtype=torch.bool))


def test_references_in_float64_are_left_to_torch() -> None:
    assert torch.equal(attended("cudnn", torch.float64), attended("auto", torch.float64))
