"""A text never claims more than was judged, and strict fails on the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.golden import DATA, recorded
from tests.typecheck.programs import MLP, PLAIN, TP, WIDTH, built, mlp
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import DivergenceError
from tpcompile.layout import ShardSpec
from tpcompile.typecheck import Report, check_module, check_types, fake_ranks

X = torch.ones(2, 8, WIDTH)


def test_a_module_that_is_judged_in_part_says_since_where_and_fails_only_when_strict() -> None:
    report = check_types(built(spectrum, **PLAIN), (X,), tp=TP, input_types=("I",))
    assert report.finding is None and 0 < report.num_judged < report.num_ops
    assert report.not_followed_since.startswith("aten._fft_r2c at test_judged.py:") and not report.is_complete
    first_line = str(report).splitlines()[0]
    assert f"{report.num_ops - report.num_judged} not judged" in first_line and report.not_followed_since in first_line
    report.raise_on_violation()
    with pytest.raises(DivergenceError, match=report.not_followed_since):
        report.raise_on_violation(strict=True)


def test_a_module_that_is_judged_whole_passes_when_strict() -> None:
    report = check_types(built(mlp, **MLP), (X,), tp=TP, input_types=("I",))
    report.raise_on_violation(strict=True)
    assert report.is_complete and report.not_followed_since == ""


def test_the_text_never_says_passed_of_what_was_not_judged_whole() -> None:
    since = "aten.fft at mlp.py:12"
    partly = Report(4, (0, 3), num_ops=38, violations=(), num_judged=6, not_followed_since=since)
    nothing = Report(4, (0,), num_ops=0, violations=())
    assert not any("passed" in str(report) for report in (partly, nothing))
    whole = Report(4, (0, 3), num_ops=38, violations=(), num_judged=38)
    text = "".join(f"{report}\n" for report in (whole, partly, nothing))
    assert text == recorded(DATA / "typecheck.txt", text)


def spectrum(m: Any, x: Tensor) -> Tensor:
    """A Fourier transform along the shard mixes what the ranks hold, and has no rule."""
    h = torch.fft.rfft(F.linear(m.comm.copy_to_tp(x), m.up)).real[..., :8].repeat_interleave(2, -1)[..., :8]
    return m.comm.all_reduce(F.linear(F.pad(h, (0, 8 - h.shape[-1])), m.down))


def decided(m: Any, x: Tensor) -> Tensor:
    best = m.comm.all_gather(F.linear(m.comm.copy_to_tp(x), m.up).detach(), dim=-1).argmax(-1)
    return x + F.embedding(best, m.table)


def test_a_decision_cuts_no_gradient() -> None:
    build = built(decided, up=PLAIN["up"], table=((32, WIDTH), None))
    check_types(build, (X,), tp=TP, input_types=("I",)).raise_on_violation()


def test_a_module_in_which_nothing_ran_is_no_pass() -> None:
    report = check_types(lambda comm: nn.Identity(), (X,), tp=TP)
    assert report.num_ops == 0 and not report.is_complete
    with pytest.raises(DivergenceError):
        report.raise_on_violation(strict=True)


def _dtensor(plan: dict[str, Any], then: Callable[[Tensor], Tensor]) -> Report:
    """A plan of torch's own, and what the module does with its output."""
    with fake_ranks(TP) as group:
        mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
        module = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH) if "2" in plan else nn.Identity())
        parallelize_module(module, mesh["tp"], plan)
        module.register_forward_hook(lambda module, inputs, output: then(output))
        return check_module(module, (X,), group=mesh.get_group("tp") if group is None else group, input_types=("I",))


def test_a_plan_of_dtensor_is_plainly_not_followed() -> None:
    report = _dtensor({"0": ColwiseParallel(), "2": RowwiseParallel()}, lambda y: y)
    assert report.finding is None and not report.is_complete
    assert report.not_followed_since.startswith("_")


def test_a_dtensor_column_linear_without_a_reduce_does_not_pass() -> None:
    report = _dtensor({"0": ColwiseParallel()}, lambda y: y)
    assert not report.is_complete or report.finding is not None


def test_a_dtensor_that_is_returned_says_that_it_is_sharded() -> None:
    report = _dtensor({"0": ColwiseParallel(use_local_output=False)}, lambda y: y)
    assert report.finding is not None and report.finding.rule == "sharded-output", str(report)


class Undeclared(nn.Module):
    """A shard without a declared layout."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        self.tp = comm
        self.up, self.down = nn.Linear(WIDTH, 32 // comm.size), nn.Linear(32 // comm.size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.all_reduce(self.down(torch.relu(self.up(self.tp.copy_to_tp(x)))))


def test_a_forgotten_layout_is_said_to_be_forgotten() -> None:
    finding = check_types(Undeclared, (X,), tp=TP, input_types=("I",)).finding
    assert finding is not None and finding.rule == "undeclared-layout"
    assert "parameter up." in finding.why and "shard_specs()" in finding.fix
    types = {"up.*": "V(0)", "down.weight": "V(1)"}
    check_types(Undeclared, (X,), tp=TP, input_types=("I",), parameter_types=types).raise_on_violation(strict=True)


def test_a_declared_replicated_weight_gets_the_advice_to_copy_it() -> None:
    class Declared(Undeclared):
        def shard_specs(self) -> dict[str, ShardSpec]:
            return {name: ShardSpec() for name, _ in self.named_parameters()}

    finding = check_types(Declared, (X,), tp=TP, input_types=("I",)).finding
    assert finding is not None and finding.rule == "missing-copy" and "copy_to_tp" in finding.fix


def test_dotted_declarations_of_a_parent_are_read() -> None:
    class Parent(Undeclared):
        def shard_specs(self) -> dict[str, ShardSpec]:
            rows, columns = ShardSpec(dim=0, parts=(32,)), ShardSpec(dim=1, parts=(32,))
            return {"up.weight": rows, "up.bias": rows, "down.weight": columns}

    check_types(Parent, (X,), tp=TP, input_types=("I",)).raise_on_violation(strict=True)
    check_types(lambda comm: nn.Sequential(Parent(comm)), (X,), tp=TP, input_types=("I",)).raise_on_violation()
