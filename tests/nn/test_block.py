"""Transformer stacks on 2 and 4 gloo ranks against the unsharded module in float64, eager and compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.graphs import GraphCapture
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError
from tpcompile.nn.block import BlockInputs, TransformerBlock, TransformerStack
from tpcompile.nn.state import load_full_state_dict, local_slices_of
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.testing import run_on_ranks

pytestmark = pytest.mark.long

FORMS: dict[str, dict[str, Any]] = {
    "wan": {"style": "wan", "bias": True, "causal": False, "num_kv_heads": 8},
    "llama": {"style": "llama", "bias": False, "causal": True, "num_kv_heads": 4},
}
WAN_2_1 = FORMS["wan"] | {
    "norm": "layer",
    "norm_affine": False,
    "rope": "interleaved",
    "modulation": True,
    "cross_attention": True,
    "context_len": 5,
}
UNEVEN = {"num_heads": 14, "head_size": 4, "ffn_dim": 26, "uneven": "pad"}
OPTIONS: dict[str, dict[str, Any]] = {
    "wan 2.1": WAN_2_1,
    "kv head replicated": FORMS["llama"] | {"num_kv_heads": 1, "bias": True},
    "kv head replicated wan": WAN_2_1 | {"num_kv_heads": 1},
    "uneven": FORMS["wan"] | UNEVEN | {"num_kv_heads": 14},
    "uneven grouped": FORMS["llama"] | UNEVEN | {"num_kv_heads": 7, "bias": True},
    "masked": FORMS["wan"] | {"masked": True},
    "masked causal": FORMS["llama"] | {"masked": True, "head_size": 12},
    "sequence parallel": WAN_2_1 | {"sequence_parallel": True, "seq_len": 8, "masked": True},
    "sequence parallel llama": FORMS["llama"]
    | {"sequence_parallel": True, "seq_len": 8, "num_kv_heads": 1, "bias": True},
    "dropout": FORMS["wan"] | {"dropout": 0.25},
    "everything": WAN_2_1
    | UNEVEN
    | {
        "num_kv_heads": 7,
        "sequence_parallel": True,
        "seq_len": 8,
        "masked": True,
        "causal": True,
        "dropout": 0.25,
    },
}
CASES = [(form, qk_norm) for form in FORMS for qk_norm in ("full", "per_head", "none")]
CASES += [(form, "full") for form in OPTIONS]
CASES += [(form, "per_head") for form in ("kv head replicated", "uneven grouped", "sequence parallel")]

# All options at once are compiled by the gate's run of them (tests/gate/test_clean.py).
COMPILED = [("wan", "full"), ("llama", "per_head"), ("kv head replicated", "none")]
COMPILED += [(form, "full") for form in ("uneven grouped", "sequence parallel llama")]


def config_of(form: str, qk_norm: str, dtype: str = "float64", num_layers: int = 2) -> BlockConfig:
    sizes = {"dim": 32, "num_heads": 8, "ffn_dim": 24, "batch": 2, "seq_len": 6}
    options = {"qk_norm": qk_norm, "eps": 1e-6, "dtype": dtype, "num_layers": num_layers}
    return BlockConfig.model_validate(sizes | options | (FORMS | OPTIONS)[form])


def build(config: BlockConfig, comm: Collectives, full: dict[str, Tensor]) -> TransformerStack:
    with torch.device("meta"):
        stack = TransformerStack(config, comm, num_layers=config.num_layers)
    stack.to_empty(device="cpu")
    load_full_state_dict(stack, full)
    return stack


_ACTIVATIONS = ("x_BSD", "modulation_B6D", "context")


def _step(model: Any, inputs: BlockInputs) -> dict[str, Tensor]:
    """Output, and gradient of every activation that enters; parameters get their `.grad`."""
    given = {n: getattr(inputs, n).clone().requires_grad_() for n in _ACTIVATIONS if getattr(inputs, n) is not None}
    y = model(*inputs._replace(**given))
    (y.sin() * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return {"output": y.detach(), **{name: t.grad for name, t in given.items()}}


def _error(value: Tensor, reference: Tensor) -> float:
    return ((value - reference).norm() / reference.norm()).item()


def _errors(config: BlockConfig, backend: Any) -> dict[str, float]:
    """Relative error of the output and of every gradient against the unsharded module."""
    torch._dynamo.reset()
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=torch.float64, seq_len=config.seq_len)
    single, sharded = build(config, Collectives(None), full), build(config, Collectives(dist.group.WORLD), full)
    expected_of = _step(single, inputs)
    got = _step(torch.compile(sharded, backend=backend, fullgraph=True) if backend else sharded, inputs)
    errors = {name: _error(value, expected_of[name]) for name, value in got.items()}
    reference = {name: parameter.grad for name, parameter in single.named_parameters()}
    expected = local_slices_of(reference, module=sharded)
    for name, parameter in sharded.named_parameters():
        assert parameter.grad is not None and reference[name].norm() > 0, name
        errors[name] = ((parameter.grad - expected[name]).norm() / reference[name].norm()).item()
    return errors


def _rows(stack: TransformerStack, config: BlockConfig, *, train: bool) -> list[tuple[str, str, str, str, str]]:
    declared = stack.declared_collectives(
        config.batch, config.seq_len, config.dtype, train=train, context_len=config.context_len
    )
    assert all(c.group in ("tp", "tp_replicas") and c.waited for c in declared)
    return [(c.phase, c.op, c.reduce_op, c.dtype, c.shape) for c in declared]


def _trained(config: BlockConfig) -> dict[str, Any]:
    """Errors under compile, the graphs of a training step, and what the stack declares for it."""
    capture = GraphCapture()
    errors = _errors(config, capture)
    with torch.device("meta"):
        stack = TransformerStack(config, Collectives(dist.group.WORLD), num_layers=config.num_layers)
    declared = _rows(stack, config, train=True)
    return {"errors": errors, "texts": capture.texts, "declared": declared, "traced": capture.collectives}


def _lowered(config: BlockConfig, *, train: bool) -> dict[str, Any]:
    """Declared and traced collectives of one call in the config's dtype."""
    capture, dtype = GraphCapture(), getattr(torch, config.dtype)
    torch._dynamo.reset()
    full = draw_stack_weights(config, seed=0, dtype=dtype, device="cpu")
    stack = build(config, Collectives(dist.group.WORLD), full)
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=dtype, seq_len=config.seq_len)
    compiled = torch.compile(stack, backend=capture, fullgraph=True)
    if train:
        _step(compiled, inputs)
    else:
        with torch.no_grad():
            compiled(*inputs)
    return {"declared": _rows(stack, config, train=train), "traced": capture.collectives}


def _modes() -> dict[str, Any]:
    """Graphs and breaks of one block in modes A and B, forward only, and the forward's error in eager and compiled."""
    config = config_of("wan", "full", num_layers=1)
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=torch.float64, seq_len=config.seq_len)
    found: dict[str, Any] = {}
    with torch.no_grad():
        reference = build(config, Collectives(None), full)(*inputs)
        for mode, strategy in {"A": DisabledCollectives, "B": InPlaceCollectives}.items():
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            stack = build(config, strategy(dist.group.WORLD), full)
            eager, compiled = stack(*inputs), torch.compile(stack, backend="eager")(*inputs)
            found[mode] = {
                "error": max(_error(eager, reference), _error(compiled, reference)),
                "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "breaks": sum(torch._dynamo.utils.counters["graph_break"].values()),
            }
    return found


def _compiled_config(form: str, qk_norm: str) -> BlockConfig:
    """Two layers, whose collectives follow each other, once for each form; a layer costs seconds to compile."""
    return config_of(form, qk_norm, num_layers=2 if form in FORMS and qk_norm == "full" else 1)


def _worker_2() -> dict[str, Any]:
    return {
        "eager": {case: _errors(config_of(*case), None) for case in CASES},
        "compiled": {case: _trained(_compiled_config(*case)) for case in COMPILED},
        "bf16": _lowered(config_of("wan", "full", dtype="bfloat16", num_layers=1), train=True),
        "inference": _lowered(config_of("wan", "full", dtype="bfloat16", num_layers=1), train=False),
        "modes": _modes(),
    }


def _worker_4() -> dict[Any, dict[str, float]]:
    return {case: _errors(config_of(*case, num_layers=1), None) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker_2, timeout_s=280)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[Any, dict[str, float]]]:
    return run_on_ranks(_worker_4, world_size=4, timeout_s=240)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_eager_on_two_ranks_equals_the_unsharded_module(ranks: list[dict[str, Any]], case: tuple[str, str]) -> None:
    assert {k: e for r in ranks for k, e in r["eager"][case].items() if not e < 1e-10} == {}


@pytest.mark.parametrize("case", COMPILED, ids="-".join)
def test_compiled_on_two_ranks_equals_the_unsharded_module(ranks: list[dict[str, Any]], case: tuple[str, str]) -> None:
    assert {k: e for r in ranks for k, e in r["compiled"][case]["errors"].items() if not e < 1e-10} == {}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_eager_on_four_ranks_equals_the_unsharded_module(four_ranks: list[Any], case: tuple[str, str]) -> None:
    assert {k: e for r in four_ranks for k, e in r[case].items() if not e < 1e-10} == {}


@pytest.mark.parametrize("case", COMPILED, ids="-".join)
def test_declared_collectives_are_the_traced_ones(ranks: list[dict[str, Any]], case: tuple[str, str]) -> None:
    for r in ranks:
        found = r["compiled"][case]
        assert found["traced"] == found["declared"]
        assert {row[0] for row in found["traced"]} == {"forward", "backward"}
        assert found["traced"] != found["declared"][::-1], "the order is part of the claim"


def test_inference_declares_the_forward_only(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["inference"]
    assert found["traced"] == found["declared"] and len(found["traced"]) == 3
    assert found["declared"] == [row for row in ranks[0]["bf16"]["declared"] if row[0] == "forward"]


def test_statistics_travel_in_float32_for_a_bf16_block(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["bf16"]
    assert found["traced"] == found["declared"]
    assert ("forward", "all_reduce", "sum", "f32", "[2, 6, 2]") in found["traced"]
    assert ("forward", "all_reduce", "sum", "bf16", "[2, 6, 32]") in found["traced"]


@pytest.mark.parametrize("case", COMPILED, ids="-".join)
def test_graphs_of_both_ranks_are_byte_equal(ranks: list[dict[str, Any]], case: tuple[str, str]) -> None:
    texts = ranks[0]["compiled"][case]["texts"]
    assert [kind for kind, _ in texts] == ["dynamo", "forward", "backward"]
    assert texts == ranks[1]["compiled"][case]["texts"]


def test_modes_differ_only_in_how_a_collective_is_issued(ranks: list[dict[str, Any]]) -> None:
    for r in ranks:
        assert max(mode["error"] for mode in r["modes"].values()) < 1e-10
        assert (r["modes"]["B"]["graphs"], r["modes"]["B"]["breaks"]) == (1, 0), "as in mode C"
        assert r["modes"]["A"]["breaks"] >= 3, "one per collective of the forward"
        assert r["modes"]["A"]["graphs"] > 3


def test_size_one_declares_no_collective() -> None:
    with torch.device("meta"):
        stack = TransformerStack(config_of("wan", "full"), Collectives(None), num_layers=2)
    assert stack.declared_collectives(2, 6, "float64", train=True) == ()


class _Comm(Collectives):
    """A place in a group that does not exist, to build modules without ranks."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__(None)
        self.size, self.rank = size, rank


def test_tp_that_does_not_divide_the_heads_is_refused() -> None:
    with torch.device("meta"), pytest.raises(ConfigError, match=r"tp=3 .*num_heads=8"):
        TransformerBlock(config_of("wan", "full"), _Comm(3))
