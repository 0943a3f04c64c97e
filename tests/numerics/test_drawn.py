"""What a run in one dtype drew is drawn again in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.evidence.judgement.checks import undecided
from tpcompile.numerics import error_ratio
from tpcompile.numerics.drawn import Drawn

PROGRAM = """
from tests.numerics import test_drawn
from tests.torch_api import test_comparing
test_comparing.test_random_numbers_are_put_back("cuda")
for program in (test_drawn.noise, test_drawn.dropout, test_drawn.gradient):
    test_drawn.test_float64_has_the_same_numbers(program, "cuda")
"""


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype, device=x.device)


def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) + F.dropout(x * 2, 0.25)


def gradient(x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    dropout(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("program", [noise, dropout, gradient])
def test_float64_has_the_same_numbers(program: object, device: str = "cpu") -> None:
    assert callable(program)
    x, drawn = torch.linspace(1, 2, 999, device=device).bfloat16(), Drawn()
    with drawn.recorded():
        single = program(x)
    torch.manual_seed(5)
    with drawn.again():
        exact = program(x.double())
    assert exact.dtype == torch.float64
    assert error_ratio.error_of(single, single, exact)["is_judged"]
    other = program(x.double())
    assert not error_ratio.error_of(single, single, other)["is_judged"]


@pytest.mark.gpu(1)
def test_so_it_has_on_a_gpu() -> None:
    command = [sys.executable, "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_what_was_not_drawn_is_drawn_anew() -> None:
    drawn = Drawn()
    with drawn.recorded():
        torch.rand(3)
    with drawn.again():
        assert not torch.equal(torch.rand(4), torch.rand(4))


@pytest.mark.parametrize(
    ("judged", "names"),
    [
        ({"forward": True, "grad a": True, "grad b": False}, []),
        ({"forward": False, "grad a": True, "grad b": True}, ["forward"]),
        ({"forward": True, "grad a": False, "grad b": False}, ["grad a", "grad b"]),
        ({"forward": True, "forward weight of a": False, "forward weight of b": True}, []),
    ],
)
def test_an_output_or_most_tensors_leave_it_undecided(judged: dict[str, bool], names: list[str]) -> None:
    assert undecided(judged) == names


def test_a_gradient_that_is_returned_in_float_has_the_error_of_the_dtype_it_was_computed_in() -> None:
    x, drawn = torch.linspace(1, 2, 999).bfloat16(), Drawn()
    with drawn.recorded():
        got = (x * 3).float()
    assert drawn.coarsest == torch.bfloat16
    far = torch.full((999,), 1.02)
    exact = torch.ones(999, dtype=torch.float64)
    assert got.dtype == torch.float32
    assert not error_ratio.error_of(far, far, exact)["is_judged"]
    assert error_ratio.error_of(far, far, exact, coarsest=drawn.coarsest)["is_judged"]


def casts(x: Tensor) -> Tensor:
    """As a training step: the loss is computed in float32, and a table in the dtype of the weights."""
    table = torch.arange(x.shape[0], dtype=torch.bfloat16) + torch.full(x.shape, 0.1)
    scaled = (x.bfloat16() * table).to(torch.float16).float()
    return F.mse_loss(scaled, torch.linspace(0, 1, x.shape[0], dtype=x.dtype))


def test_what_a_program_casts_to_a_narrower_dtype_is_in_float64_too() -> None:
    x, drawn = torch.linspace(1, 2, 99), Drawn()
    with drawn.exactly():
        leaf = x.double().requires_grad_()
        exact = casts(leaf)
        exact.backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float64
    assert exact.dtype == torch.float64
    table = torch.arange(99).double() + 0.1
    wanted = ((x.double() * table - torch.linspace(0, 1, 99, dtype=torch.float64)) ** 2).mean()
    assert torch.isclose(exact, wanted, rtol=1e-12, atol=0)
    assert torch.get_default_dtype() == torch.float32
    with drawn.again():  # the negative control; torch 2.11 would raise in the backward
        assert not torch.isclose(casts(x.double()).double(), wanted, rtol=1e-12, atol=0)
