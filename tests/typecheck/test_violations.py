"""Every violation is found, by its rule, at its op and on its line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.nn.test_block import config_of
from tests.typecheck.broken import FAULTS, Fault, bias_before_reduce, embedding_returned_without_reduce
from tests.typecheck.programs import MLP, TOKENS, TP, WIDTH, built, mlp
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.errors import DivergenceError, ExitCode
from tpcompile.gate import faults
from tpcompile.gate.faults.collectives import DoubleCopy, DroppedResult, LocalNorm
from tpcompile.gate.faults.fault import FaultContext
from tpcompile.nn.block import TransformerStack
from tpcompile.typecheck import Report, Violation, check_types


def _checked(fault: Fault, device: str = "cpu", train: bool = True) -> Report:
    def build(comm: Collectives) -> torch.nn.Module:
        with torch.device(device):
            return built(fault.forward, **fault.layouts)(comm)

    x = torch.ones(2, TOKENS, WIDTH, device=device)
    return check_types(build, (x,), tp=TP, input_types=(fault.input_type,), output_type=fault.output_type, train=train)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.forward.__name__)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_first_violation_names_rule_op_and_line(fault: Fault, device: str) -> None:
    if device == "meta" and fault.op == "c10d.allreduce":
        pytest.skip("a bare dist.all_reduce cannot run on meta tensors")
    report = _checked(fault, device)
    assert report.finding is not None, "not found"
    assert (report.finding.rule, report.finding.op) == (fault.rule, fault.op), str(report)
    if fault.op != "output":
        assert report.finding.site.source.endswith("# here"), str(report)
        assert report.finding.site.function == fault.forward.__name__


ABOUT_GRADIENTS = ("missing-copy", "double-copy", "needs-dst-R", "needs-dst-I", "wrong-src", "no-stated-gradient")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.forward.__name__)
def test_without_gradients_only_the_wrong_values_are_found(fault: Fault) -> None:
    found = _checked(fault, train=False).finding
    # Without a gradient, an output that differs per rank on no known dim may be meant.
    is_spared = fault.rule in ABOUT_GRADIENTS or fault.forward is embedding_returned_without_reduce
    assert found is None if is_spared else found is not None and found.rule == fault.rule


def test_one_fault_is_reported_once() -> None:
    fault = next(f for f in FAULTS if f.forward is bias_before_reduce)
    report = _checked(fault)
    assert len(report.violations) == 1 and report.violations[0].ranks == (0, TP - 1)


def test_the_error_names_rule_line_module_reason_and_what_to_do() -> None:
    report = _checked(next(f for f in FAULTS if f.forward is bias_before_reduce))
    with pytest.raises(DivergenceError) as error:
        report.raise_on_violation()
    assert error.value.exit_code == ExitCode.FAIL
    line = inspect.getsourcelines(bias_before_reduce)[1] + 2
    for text in ("bias-before-reduce: aten.addmm(", f"broken.py:{line} in bias_before_reduce of Program: ",
                 "counts it 4 times", "do: all_reduce the partial sum first, then add"):  # fmt: skip
        assert text in str(error.value)


def test_a_clean_report_raises_nothing_and_says_what_was_followed() -> None:
    report = check_types(built(mlp, **MLP), (torch.ones(2, TOKENS, WIDTH),), input_types="I")
    report.raise_on_violation()
    assert report.num_judged == report.num_ops and report.ranks == (0, 3)
    assert re.match(f"type check passed: .*{report.num_ops} of {report.num_ops} .*tp=4$", str(report))


STACK_FAULTS = {
    "dropped result": (DroppedResult, "result-dropped", "collectives.all_reduce(x, group=self.group, dst=dst)"),
    "double copy": (DoubleCopy, "double-copy", "return super().copy_to_tp(super().copy_to_tp(x))"),
    "local norm": (LocalNorm, "partial-used-as-whole", "torch.rsqrt(mean_square_1 + eps)"),
    "in place": (InPlaceCollectives, "missing-copy", "F.linear("),
    "disabled": (DisabledCollectives, "missing-copy", "F.linear("),
}


@pytest.mark.parametrize("name", STACK_FAULTS)
def test_a_fault_of_the_gate_is_found_in_the_stack(name: str) -> None:
    strategy, rule, source = STACK_FAULTS[name]
    finding = _stack_finding(
        lambda comm: TransformerStack(config_of("wan", "full"), strategy(comm.group), num_layers=2)
    )
    assert finding.rule == rule and source in finding.site.source, str(finding)


def test_a_bias_added_first_is_found_in_the_stack() -> None:
    def build(comm: Collectives) -> torch.nn.Module:
        fault = faults.find("bias_before_reduce")
        stack = TransformerStack(config_of("wan", "full"), comm, num_layers=2)
        return fault.program(stack, FaultContext(0, TP, 0))

    finding = _stack_finding(build)
    assert (finding.rule, finding.op) == ("bias-before-reduce", "aten.addmm")
    assert "nn.functional.linear(x_BSi, self.weight, self.bias)" in finding.site.source
    assert finding.site.module == "layers.0.attention.wo (_BiasBeforeReduce)"


def test_an_in_place_reduce_is_found_where_copy_to_tp_is_stated() -> None:
    class OnlyReduces(InPlaceCollectives):
        def copy_to_tp(self, x: Tensor) -> Tensor:
            return Collectives(self.group).copy_to_tp(x)

    finding = _stack_finding(
        lambda comm: TransformerStack(config_of("wan", "none"), OnlyReduces(comm.group), num_layers=2)
    )
    assert (finding.rule, finding.op) == ("no-stated-gradient", "c10d.allreduce")


def _stack_finding(build: Callable[[Collectives], torch.nn.Module]) -> Violation:
    x = torch.ones(2, 6, 32, dtype=torch.float64, requires_grad=True)
    tables = torch.ones(6, 2, dtype=torch.float64)
    finding = check_types(build, (x, tables, tables), tp=TP).finding
    assert finding is not None
    return finding
