"""All ranks in one process: clean modules agree with their references, every known fault is named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.block_forms import form_config, forms_of
from tests.numerics.modules import FAULTS, LinearPair, Lookup, NormedMLP, ids, inputs, whole_inputs
from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.layout import ShardSpec
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.draw import draw_inputs, draw_weights, head_scales
from tpcompile.numerics.numerics_report import TensorError
from tpcompile.ranks import groups
from tpcompile.testing import NumericsReport, check_numerics_local

# Fault -> a tensor, or the collectives, that must be named.
NAMED = {
    "funcol gradient": "grad up.weight",
    "local norm": "forward",
    "identity norm gradient": "grad up.weight",
    "dropped result": "forward",
    "bias before reduce": "forward",
    "no entry": "grad input",
    "one too many": "collectives",
    "wrong order": "collectives",
    "nan": "forward",
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small only lose time to threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(fault: str = "", *, tp: int = 2, **options: Any) -> NumericsReport:
    """A report on NormedMLP, which declares its collectives."""
    build = partial(NormedMLP, fault=fault, hidden=options.pop("hidden", 32))
    settings = {"inputs": inputs, "declared": lambda module, dtype: module.declared(dtype)} | options
    return check_numerics_local(build, tp=tp, **settings)


def failures(report: NumericsReport) -> dict[str, str]:
    """What is wrong on any rank."""
    return {what: how for program in report.programs for what, how in program.failures(report.limit).items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_clean_module_agrees_with_its_single_device_reference(tp: int) -> None:
    report = check(tp=tp, dtypes=("float32", "bfloat16"))
    report.raise_on_failure()
    assert [(p.rank, p.dtype) for p in report.programs] == [(r, d) for d in ("float32", "bfloat16") for r in range(tp)]
    names = {"forward", "grad input", "grad up.weight", "grad up.bias", "grad norm.weight", "grad down.weight"}
    assert {t.name for t in report.programs[0].tensors} == names | {"grad down.bias"}
    assert len(report.programs[0].collectives) == (0 if tp == 1 else 4)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_red_and_named(fault: str) -> None:
    report = check(fault)
    assert NAMED[fault] in failures(report)
    with pytest.raises(DivergenceError, match=rf"{NAMED[fault]} \| Collectives, eager"):
        report.raise_on_failure()


@pytest.mark.parametrize("fault", ["funcol gradient", "identity norm gradient", "no entry"])
def test_gradient_fault_leaves_the_forward_right(fault: str) -> None:
    found = failures(check(fault, declared=None))
    assert "forward" not in found and found


def test_funcol_gradient_is_off_by_the_group_size() -> None:
    report = check("funcol gradient", declared=None, tp=4)
    error = {t.name: t.error for t in report.programs[0].tensors}
    assert error["grad up.weight"] == pytest.approx(3, rel=1e-3)  # 4 times the gradient
    assert error["grad down.bias"] < 1e-6


def test_order_is_named_by_its_first_position_and_both_sides() -> None:
    text = failures(check("wrong order"))["collectives"]
    assert re.match(r"position 0: .* f32\[6, 1\] .* f32\[6, 16\] .*\(4 issued, 4 ", text)


def test_extra_collective_is_named_by_its_position() -> None:
    text = failures(check("one too many"))["collectives"]
    assert re.match(r"position 2: .*forward \S+ f32\[1, 16\] .* backward", text)


def test_backward_collectives_are_compared_too() -> None:
    text = failures(check("no entry"))["collectives"]
    assert re.match(r"position 3: .*nothing, .* backward \S+ f32\[6, 16\]", text)


def test_nan_is_named_with_its_rank_only() -> None:
    report = check("nan")
    assert ["forward" in p.failures(report.limit) for p in report.programs] == [False, True]
    assert "nan" in report.text()


def test_local_norm_hides_in_a_loose_tolerance_on_iid_data_and_not_on_skewed() -> None:
    with torch.device("meta"):
        module = NormedMLP(Collectives(None), hidden=4096)
    iid = draw_weights(module, seed=0, dtype=torch.float32, device="cpu", values="iid")
    scales = head_scales(8, 4096, device="cpu")
    skewed = iid | {"up.weight": iid["up.weight"] * scales[:, None], "up.bias": iid["up.bias"] * scales}
    errors = {}
    for values, weights in (("iid", iid), ("skewed", skewed)):
        report = check("local norm", weights=weights, hidden=4096, declared=None)
        errors[values] = max(p.tensors[0].error for p in report.programs)
        assert "forward" in failures(report), "the ratio sees it on any data"
    assert errors["iid"] < 2e-2 < 0.2 < errors["skewed"]


def test_lookup_without_a_sum_is_exact() -> None:
    report = check_numerics_local(Lookup, inputs=ids, tp=4, dtypes=("float32", "bfloat16"), exact=("*",))
    report.raise_on_failure()
    assert all(t.exact for p in report.programs for t in p.tensors)


def test_whole_numbers_make_sums_exact() -> None:
    check_numerics_local(LinearPair, inputs=whole_inputs, tp=8, values="integers", exact=("*",)).raise_on_failure()


def test_exact_value_that_is_off_by_a_rounding_is_red() -> None:
    build = partial(LinearPair, scale=1 + 2.0**-23)
    loose = check_numerics_local(build, inputs=whole_inputs, tp=2, values="integers", limit=100)
    loose.raise_on_failure()
    report = check_numerics_local(build, inputs=whole_inputs, tp=2, values="integers", limit=100, exact=("forward",))
    assert "forward" in failures(report)
    assert {t.name for p in report.programs for t in p.tensors if t.differs} == {"forward"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"exact": ("grad nothing",)}, "exact='grad nothing' matches no tensor"),
        ({"differentiate": ("input.3",)}, "differentiate=.* is no floating input"),
        ({"sharded": {"outputs": 0}}, "sharded=.* is no input or output"),
        (
            {"sharded": {"forward": 0}},
            r"forward has shape \(6, 16\) on this rank, its slice of the reference \(3, 16\)",
        ),
    ],
)
def test_unknown_name_or_layout_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(**options)


class Shards(nn.Module):
    """Takes and gives shards, a dict and a tuple of them, and a mask it does nothing with."""

    def __init__(self, comm: TpComm) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(8 // comm.size))

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Sharded like the activations."""
        return {"weight": ShardSpec(dim=0, parts=(8,))}

    def forward(self, x: dict[str, Tensor | None], mask: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Products of the shards, and their sum over the ranks."""
        product = x["a"] * self.weight
        return product, {"sum": self.comm.all_reduce(product.sum(-1)), "kept": product.detach()}


def test_sharded_inputs_nested_tensors_and_outputs_without_a_gradient_are_compared() -> None:
    def given(dtype: torch.dtype) -> tuple[dict[str, Tensor | None], Tensor]:
        return {"a": torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype), "b": None}, torch.ones(
            2
        ) > 0

    layout = {"input": -1, "forward": -1, "forward.1.kept": -1}
    report = check_numerics_local(Shards, inputs=given, tp=2, sharded=layout, exact=("forward", "forward.1.kept"))
    report.raise_on_failure()
    names = [t.name for t in report.programs[0].tensors]
    assert names == ["forward", "forward.1.sum", "forward.1.kept", "grad input", "grad weight"]


class Plain(nn.Module):
    """A module of no library: it declares no layouts, and keeps its collectives under a name of its own."""

    def __init__(self, comm: TpComm) -> None:
        super().__init__()
        self.tp = comm
        self.up, self.down = nn.Linear(16, 32 // comm.size), nn.Linear(32 // comm.size, 16, bias=False)
        self.bias = nn.Parameter(torch.empty(16))

    def forward(self, x: Tensor) -> Tensor:
        """[N, 16] -> [N, 16]."""
        h = torch.relu(self.up(self.tp.copy_to_tp(x)))
        return self.tp.all_reduce(self.down(h), dst="I") + self.bias


def test_a_plain_module_is_compared_with_layouts_by_pattern() -> None:
    layouts = {"up.*": 0, "down.weight": ShardSpec(dim=1, parts=(32,))}
    report = check_numerics_local(Plain, inputs=inputs, tp=2, layouts=layouts)
    report.raise_on_failure()
    names = {t.name for t in report.programs[0].tensors}
    assert {"grad up.weight", "grad up.bias", "grad down.weight", "grad bias"} <= names


@pytest.mark.parametrize(
    ("layouts", "said"),
    [
        (None, r"no layout is declared for \['bias', 'down.weight', 'up.bias', 'up.weight'\]"),
        ({"up.*": 0}, r"down.weight: full shape \(16, 32\), expected \(16, 16\)"),
        ({"up.weight": 1, "up.bias": 0, "down.*": 1}, r"up.weight: full shape \(32, 16\), expected \(16, 32\)"),
    ],
    ids=["none", "forgotten", "wrong dim"],
)
def test_missing_or_wrong_layouts_of_a_plain_module_are_refused(layouts: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_numerics_local(Plain, inputs=inputs, tp=2, layouts=layouts)


def test_a_report_prints_as_its_text() -> None:
    report = check("nan", tp=2)
    assert str(report) == report.text() and "findings:" in f"{report}"


def test_report_is_stable_json_and_survives_it() -> None:
    for fault in ("", "nan"):
        one, two = check(fault, tp=2), check(fault, tp=2)
        assert one.to_json() == two.to_json()
        data = json.loads(one.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert NumericsReport.model_validate(data).to_json() == one.to_json()


def test_missing_gradient_is_reported() -> None:
    error = TensorError(name="grad x", error=1.0, single=0.0, ratio=float("inf"))
    assert "missing" in error.text(2.5) and not error.is_right(2.5)


def test_local_ranks_leave_nothing_behind() -> None:
    before = dict(groups._RANK_INDEX), dict(groups._NEIGHBOURS)
    check(tp=2)
    assert (dict(groups._RANK_INDEX), dict(groups._NEIGHBOURS)) == before
    assert not dist.is_initialized()
    assert type(torch.zeros(1) + 1) is Tensor


@pytest.mark.slow
@pytest.mark.parametrize("form", forms_of("cpu"))
def test_every_block_form_agrees_with_its_single_device_reference_on_four_local_ranks(form: str) -> None:
    config = form_config(form, "cpu")
    block_report(config, tp=4).raise_on_failure()


def block_report(config: BlockConfig, *, tp: int) -> NumericsReport:
    """A stack against its reference, with its declared collectives."""
    wanted = {"input": True, "input.modulation_B6D": config.modulation, "input.context": config.cross_attention}
    return check_numerics_local(
        lambda comm: TransformerStack(config, comm, num_layers=config.num_layers),
        inputs=lambda dtype: draw_inputs(config, seed=1, device="cpu", dtype=dtype, seq_len=config.seq_len),
        tp=tp,
        differentiate=[name for name, there in wanted.items() if there],
        declared=lambda stack, dtype: stack.declared_collectives(
            config.batch, config.seq_len, dtype, True, context_len=config.context_len
        ),
    )
