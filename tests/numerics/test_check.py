"""`check_numerics` on gloo ranks: eager and compiled programs, every mode, and the faults only compiled code shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.numerics.modules import LinearPair, NormedMLP, inputs
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.evidence.records import MistakeKind
from tpcompile.testing import NumericsReport, check_numerics, run_on_ranks

COMPILED_FAULTS = ("funcol gradient", "dropped result", "one too many")


class NotReduced(Collectives):
    """Leaves every sum to the ranks."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        """The rank's own part."""
        return x


class Hidden(nn.Module):
    """The clean module behind a wall that Dynamo does not pass."""

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self.inner = NormedMLP(comm)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        """[N, WIDTH] -> [N, WIDTH]."""
        return self.inner(x)


def check(fault: str = "", group: Any = None, **options: Any) -> NumericsReport:
    settings = {"inputs": inputs, "declared": lambda module, dtype: module.declared(dtype)} | options
    return check_numerics(partial(NormedMLP, fault=fault), group=group, **settings)


def _worker_2() -> dict[str, NumericsReport]:
    world = dist.group.WORLD
    found = {
        "clean": check(group=world),
        "modes": check(group=world, strategies=(InPlaceCollectives, DisabledCollectives)),
        "B with gradients": check(group=world, strategies=(InPlaceCollectives,), programs=("eager",), backward=True),
        "nothing compiled": check_numerics(Hidden, inputs=inputs, group=world, programs=("aot_eager",)),
        "not reduced": check_numerics(
            LinearPair, inputs=inputs, group=world, programs=("eager",), strategies=(NotReduced,), backward=False
        ),
        "nan": check("nan", group=world, programs=("eager",)),
    }
    return found | {fault: check(fault, group=world, programs=("aot_eager",)) for fault in COMPILED_FAULTS}


def _worker_4() -> dict[str, NumericsReport]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return {
        "four": check(group=dist.group.WORLD, programs=("eager",)),
        "pair": check(group=pairs[dist.get_rank() // 2], programs=("eager",)),
    }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, NumericsReport]]:
    return run_on_ranks(_worker_2, timeout_s=240)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, NumericsReport]]:
    return run_on_ranks(_worker_4, world_size=4, timeout_s=240)


def failures(report: NumericsReport) -> dict[str, str]:
    """What is wrong on any rank."""
    return {what: how for program in report.programs for what, how in program.failures(report.limit).items()}


@pytest.mark.parametrize("name", ["clean", "modes"])  # with Inductor: test_documented.py
def test_clean_module_agrees_on_two_ranks(ranks: list[dict[str, NumericsReport]], name: str) -> None:
    ranks[0][name].raise_on_failure()


@pytest.mark.parametrize("name", ["four", "pair"])
def test_clean_module_agrees_on_four_ranks_and_in_a_group_of_them(
    four_ranks: list[dict[str, NumericsReport]], name: str
) -> None:
    for found in four_ranks:
        found[name].raise_on_failure()
    assert four_ranks[3][name].tp == {"four": 4, "pair": 2}[name]


def test_clean_module_agrees_on_one_device() -> None:
    report = check(group=None, programs=("eager",))
    report.raise_on_failure()
    assert report.tp == 1 and report.worst[1].ratio <= 1


def test_report_is_equal_on_all_ranks_and_holds_all_of_them(ranks: list[dict[str, NumericsReport]]) -> None:
    for name, report in ranks[0].items():
        assert report.to_json() == ranks[1][name].to_json()
        assert {p.rank for p in report.programs} == {0, 1}


def test_eager_and_compiled_issue_the_same_collectives(ranks: list[dict[str, NumericsReport]]) -> None:
    eager, compiled = (
        [p.collectives for p in ranks[0]["clean"].programs if p.program == program]
        for program in ("eager", "aot_eager")
    )
    assert eager == compiled and len(eager[0]) == 4


def test_modes_without_a_gradient_contract_are_compared_forward_only(ranks: list[dict[str, NumericsReport]]) -> None:
    programs = [*ranks[0]["clean"].programs, *ranks[0]["modes"].programs]
    names = {p.strategy: {t.name for t in p.tensors} for p in programs}
    assert names["InPlaceCollectives"] == names["DisabledCollectives"] == {"forward"} < names["Collectives"]
    breaks = {p.strategy: p.breaks for p in programs if p.program == "aot_eager"}
    assert breaks["DisabledCollectives"] > 0 == breaks["Collectives"]


def test_gradients_of_mode_b_are_wrong_in_eager(ranks: list[dict[str, NumericsReport]]) -> None:
    report = ranks[0]["B with gradients"]
    eager = next(p for p in report.programs if p.program == "eager").failures(report.limit)
    assert "forward" not in eager and {"grad input", "grad up.weight"} <= eager.keys()


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("funcol gradient", "grad up.weight"),
        ("dropped result", "forward"),
        ("one too many", "collectives"),
    ],
)
def test_fault_in_compiled_code_is_red_and_named(
    ranks: list[dict[str, NumericsReport]], fault: str, named: str
) -> None:
    report = ranks[1][fault]
    assert {p.program for p in report.programs} == {"aot_eager"}
    assert named in failures(report)
    assert f"  {named} | Collectives, aot_eager, float32 | rank" in report.text()


def test_dropped_result_is_seen_in_the_graph(ranks: list[dict[str, NumericsReport]]) -> None:
    assert "result dropped" in failures(ranks[0]["dropped result"])["collectives"]


def test_program_in_which_nothing_was_compiled_is_red(ranks: list[dict[str, NumericsReport]]) -> None:
    assert "compile" in failures(ranks[0]["nothing compiled"])


def test_module_in_which_wrong_numbers_begin_is_named(ranks: list[dict[str, NumericsReport]]) -> None:
    assert {program.first_wrong for program in ranks[0]["not reduced"].programs} == {"down"}


def test_op_with_which_wrong_numbers_begin_is_named_with_its_line(ranks: list[dict[str, NumericsReport]]) -> None:
    op = ranks[0]["not reduced"].programs[0].first_wrong_op
    assert op is not None and op.line is not None
    assert (op.about, Path(op.line.file).name, op.line.function) == ("aten.mm", "linear.py", "partial")
    assert op.kind == MistakeKind.NOT_SUMMED


def test_wrong_rank_is_named(ranks: list[dict[str, NumericsReport]]) -> None:
    line = next(line for line in ranks[0]["nan"].text().splitlines() if line.startswith("  forward |"))
    assert "rank 1 |" in line and "rank 0" not in line
