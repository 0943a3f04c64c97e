"""Shares of replicated tensors and gathers of statistics: the check says what the numbers of real ranks say."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.typecheck import averaged, gathered, scaled
from tests.typecheck.scaled import (
    COUNTED,
    ON_SOME,
    SHARE,
    Scaled,
    bias_of_the_first_rank,
    divided_and_multiplied,
    divided_bias,
    divided_twice,
    entered_bias_of_the_first_rank,
    masked_entered_bias,
)
from tpcompile.collectives.strategies import Collectives
from tpcompile.layout import ShardSpec
from tpcompile.ranks import groups
from tpcompile.testing import run_on_ranks
from tpcompile.typecheck import Report, check_types

WIDTH, HIDDEN = 8, 16
SHAPES = {
    "up": (HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
    "square": (WIDTH, WIDTH),
    "table": (4 * HIDDEN, WIDTH),
    "bias": (WIDTH,),
}
SHARDED = {"up": 0, "down": 1}
PROGRAMS = (*scaled.PROGRAMS, *averaged.PROGRAMS, *gathered.PROGRAMS)
ABOUT_GRADIENTS = (SHARE, ON_SOME, "missing-copy")
HELPERS = ("reduced_in_place", "_average", "_reduced", "_moments", "_softmax_pair")
"""Functions of the programs that may have the line of a finding."""
Numbers = dict[str, Tensor]
"""Output and gradients, by name."""


class Module(nn.Module):
    """The parameters of a program, this rank's share of those that are sharded."""

    def __init__(self, program: Scaled, comm: Collectives, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.comm, self.program = comm, program
        seeded = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            full = torch.randn(shape, generator=seeded, dtype=torch.float64).to(dtype)
            self.register_parameter(name, nn.Parameter(_own(name, full, comm).clone()))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {name: ShardSpec(SHARDED[name], parts=(HIDDEN,)) if name in SHARDED else ShardSpec() for name in SHAPES}

    def forward(self, x: Tensor) -> Tensor:
        return self.program.forward(self, x)


def _own(name: str, full: Tensor, comm: Collectives) -> Tensor:
    return full.chunk(comm.size, SHARDED[name])[comm.rank] if name in SHARDED else full


def _numbers(program: Scaled, comm: Collectives) -> Numbers:
    """What this rank computes in float64, with the same upstream gradient on all ranks."""
    module = Module(program, comm, torch.float64)
    seeded = torch.Generator().manual_seed(11)
    x = torch.randn(2, 8, WIDTH, generator=seeded, dtype=torch.float64).requires_grad_()
    output = module(x)
    output.backward(torch.randn(output.shape, generator=seeded, dtype=torch.float64))
    named = {"x": x, **dict(module.named_parameters())}
    grads = {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for name, tensor in named.items()}
    return {"output": output.detach(), **grads}


def _ratios() -> list[dict[str, float]]:
    """For every program, what differs on this rank from one device, and by which factor."""
    comm, alone = Collectives(dist.group.WORLD), Collectives(None)
    return [_ratios_of(_numbers(program, comm), _numbers(program, alone), comm) for program in PROGRAMS]


def _ratios_of(found: Numbers, wanted: Numbers, comm: Collectives) -> dict[str, float]:
    ratios = {}
    for name, full in wanted.items():
        own = _own(name, full, comm)
        if not torch.allclose(found[name], own, rtol=1e-9, atol=1e-9):
            ratios[name] = ((found[name] * own).sum() / (own * own).sum()).item()
    return ratios


@functools.cache
def _facts(tp: int) -> dict[str, dict[str, float]]:
    """Program -> what differs on the last rank, on which a bias of rank 0 alone is missing."""
    found = run_on_ranks(_ratios, world_size=tp)[-1]
    return {program.forward.__name__: ratios for program, ratios in zip(PROGRAMS, found, strict=True)}


def _checked(program: Scaled, tp: int, **options: Any) -> Report:
    x = torch.ones(2, 8, WIDTH, requires_grad=True)
    return check_types(lambda comm: Module(program, comm), (x,), tp=tp, **options)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.forward.__name__)
def test_the_check_says_what_the_numbers_say(program: Scaled, tp: int) -> None:
    wrong = _facts(tp)[program.forward.__name__]
    report = _checked(program, tp)
    finding = report.finding
    assert (finding is None) == (not wrong), f"{wrong}\n{report}"
    if finding is None:
        assert not program.rule and report.is_complete == program.is_complete, str(report)
        return
    assert finding.rule == program.rule, str(report)
    assert finding.site.function in (program.forward.__name__, *HELPERS), str(report)
    assert ("output" in wrong) == (finding.rule not in ABOUT_GRADIENTS), f"{wrong}\n{report}"


@pytest.mark.parametrize("tp", [2, 4])
def test_a_share_is_reported_with_the_part_of_the_gradient_that_the_numbers_have(tp: int) -> None:
    wrong = _facts(tp)["divided_bias"]
    assert wrong == {"bias": pytest.approx(1 / tp)}
    finding = _checked(Scaled(divided_bias), tp).finding
    assert finding is not None
    assert finding.rule == SHARE and f"(I) times {1 / tp:g} " in finding.why and f" 1/{tp} " in finding.why
    assert "copy_to_tp" in finding.fix


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.forward.__name__)
def test_without_gradients_a_share_is_right_and_a_whole_is_counted(program: Scaled) -> None:
    finding = _checked(program, 4, train=False).finding
    wanted = "" if program.rule in ABOUT_GRADIENTS else program.rule
    assert ("" if finding is None else finding.rule) == wanted, str(finding)


def test_a_share_is_right_where_its_gradients_are_summed_after_the_backward() -> None:
    assert _checked(Scaled(divided_bias), 4, parameter_types={"bias": "R"}).finding is None
    counted = next(program for program in PROGRAMS if program.rule == COUNTED)
    assert _checked(counted, 4, parameter_types={"bias": "R"}).finding is not None


@pytest.mark.parametrize("forward", [divided_twice, divided_and_multiplied])
def test_what_numbers_do_not_tell_is_not_judged(forward: Any) -> None:
    """They may be numbers of the model's own, which the number of ranks happens to equal."""
    report = _checked(Scaled(forward), 4)
    assert report.finding is None and report.not_followed_since.startswith("aten.add at scaled.py:")


def test_a_sum_of_what_each_rank_chose_is_not_judged() -> None:
    report = _checked(Scaled(gathered.sum_of_chosen), 4)
    assert report.finding is None and report.not_followed_since.startswith("all_reduce at gathered.py:")


@pytest.mark.parametrize("forward", [averaged.divided_parts, averaged.divided_sum])
def test_a_sum_over_the_ranks_divided_by_their_number_may_be_a_mistake(forward: Any) -> None:
    report = _checked(Scaled(forward), 4)
    assert report.finding is None and report.not_followed_since.startswith("aten.div at averaged.py:")
    assert report.num_judged == report.num_ops - len(report.ranks)


def test_a_copy_on_the_first_rank_alone_is_no_sum_of_its_gradients() -> None:
    finding = _checked(Scaled(entered_bias_of_the_first_rank), 4).finding
    assert finding is not None and finding.rule == ON_SOME and finding.ranks == (0,)
    assert "copy_to_tp" in finding.why


@pytest.mark.parametrize("forward", [bias_of_the_first_rank, entered_bias_of_the_first_rank])
def test_a_bias_that_the_first_rank_adds_for_all_is_right_without_gradients(forward: Any) -> None:
    report = _checked(Scaled(forward), 4, train=False)
    assert report.finding is None and not report.is_complete
    assert report.not_followed_since.startswith("aten.addmm at scaled.py:")


def test_one_rank_that_is_followed_alone_may_be_any() -> None:
    finding = _checked(Scaled(bias_of_the_first_rank), 4, ranks=(0,)).finding
    assert finding is not None and finding.rule == COUNTED


def test_the_rank_differs_per_rank_where_the_module_is_the_first_to_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_RANK_INDEX", {})
    assert _checked(Scaled(masked_entered_bias), 4).finding is None
