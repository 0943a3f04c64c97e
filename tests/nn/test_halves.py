"""Stacks whose tokens go in two halves, on 2 gloo ranks: numbers, collectives, what runs beside them, refusals."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import fresh_cache, run_and_get_code

from tests.graphs import GraphCapture
from tests.nn.test_block import WAN_2_1, build, config_of
from tpcompile.by_size.setting import Sums
from tpcompile.by_size.table import Cell, Table
from tpcompile.collectives.asynchronous import Pending
from tpcompile.collectives.strategies import Collectives, DisabledCollectives
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.halves import lengths
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights
from tpcompile.testing import run_on_ranks

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "wan": ("wan", {}),
    "odd tokens": ("wan", {"seq_len": 7}),
    "only sums in flight": ("wan", {"qk_norm": "none"}),
    "llama": ("llama", {"batch": 1}),
    "masked causal": ("masked causal", {}),
    "modulated": ("wan", WAN_2_1 | {"cross_attention": False}),
    "kv head replicated": ("kv head replicated", {}),
}
PUSHING = Table(cells=(Cell(gpu="cpu", num_ranks=2, rows=(), push_from_bytes=1),))


class NotSummed(Collectives):
    """A sum in flight that gives each rank its own part."""

    def all_reduce_start(self, x: Tensor, dst: Any = "I") -> Pending:
        return Pending(lambda: x)


class OwnAllReduce(Collectives):
    """A subclass that replaces the sum, and says nothing of one in flight."""

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        return x


def config_in_halves(name: str) -> BlockConfig:
    form, changed = CASES[name]
    options = config_of(form, "full").model_dump() | changed | {"halves": True}
    return BlockConfig.model_validate(options)


def error_of(name: str, comm: type[Collectives] = Collectives) -> float:
    """Of the output in float64, against one device with all tokens at once."""
    config = config_in_halves(name)
    whole = config.model_copy(update={"halves": False})
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=torch.float64, seq_len=config.seq_len)
    with torch.no_grad():
        expected = build(whole, Collectives(None), full)(*inputs)
        found = build(config, comm(dist.group.WORLD), full)(*inputs)
    return float((found - expected).norm() / expected.norm())


def built(config: BlockConfig) -> tuple[TransformerStack, Any]:
    """The stack on this rank, and its inputs."""
    full = draw_stack_weights(config, seed=0, dtype=torch.float64, device="cpu")
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=torch.float64, seq_len=config.seq_len)
    return build(config, Collectives(dist.group.WORLD), full), inputs


def traced() -> dict[str, Any]:
    """What one layer declares, and what is traced."""
    config = config_in_halves("odd tokens").model_copy(update={"num_layers": 1})
    (stack, inputs), capture = built(config), GraphCapture()
    declared = stack.declared_collectives(config.batch, config.seq_len, config.dtype, train=False)
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(stack, backend=capture, fullgraph=True)(*inputs)
    return {
        "declared": [(one.op, one.shape) for one in declared],
        "traced": [(row[1], row[4]) for row in capture.collectives],
    }


def pushed() -> dict[str, Any]:
    """The code of two layers with sums that are pushed; both halves have the same kernels, which are compiled once."""
    stack, inputs = built(config_in_halves("only sums in flight"))
    torch.compiler.reset()
    with torch.no_grad(), fresh_cache():
        pushing = torch.compile(stack, fullgraph=True, dynamic=False, options=Sums(PUSHING).options)
        found, (code,) = run_and_get_code(pushing, *inputs)
        expected = stack(*inputs)
    return {"error": float((found - expected).norm() / expected.norm()), "code": code}


def everything() -> dict[str, Any]:
    return {
        "errors": {name: error_of(name) for name in CASES},
        "in place": error_of("wan", DisabledCollectives),
        "own": error_of("only sums in flight", OwnAllReduce),
        "not summed": error_of("wan", NotSummed),
        "traced": traced(),
        "pushed": pushed(),
    }


@cache
def seen() -> dict[str, Any]:
    first, second = run_on_ranks(everything)
    assert first["traced"]["declared"] == second["traced"]["declared"]
    return dict(first)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_halves_compute_what_all_tokens_at_once_do(name: str) -> None:
    assert seen()["errors"][name] < 1e-12


@pytest.mark.slow
def test_a_sum_that_is_not_made_is_seen() -> None:
    assert seen()["not summed"] > 0.1


@pytest.mark.slow
def test_collectives_without_an_asynchronous_form_are_complete_at_the_start() -> None:
    assert seen()["in place"] < 1e-12
    assert seen()["own"] > 0.1


@pytest.mark.slow
def test_what_is_declared_is_what_is_traced() -> None:
    found = seen()["traced"]
    assert found["declared"] == found["traced"]
    assert [shape for _, shape in found["declared"]][1:5] == ["[2, 4, 32]", "[2, 3, 32]"] * 2


@pytest.mark.slow
def test_each_sum_has_a_product_beside_it_that_comes_before_its_end() -> None:
    """But for the last of all, and for the first of the halves that attention leaves, which has one of the other."""
    found = seen()["pushed"]
    assert found["error"] < 1e-12
    marks = {"_push_start.default(": "s", "_push_receive.default(": "f", "extern_kernels.": "p"}
    lines = [line for line in found["code"].splitlines() if " = async" not in line and "assert_" not in line]
    events = "".join(mark for line in lines for text, mark in marks.items() if text in line)
    assert events.replace("pp", "p").count("s") == 8
    assert events.endswith("spsfppsfppsff"), events
    assert "spsfppsfppsfpf" in events, events


@pytest.mark.slow
def test_one_kernel_adds_what_was_received_to_what_follows_and_none_reads_it_after_the_release() -> None:
    """Nor does a later result take its memory, to which the peer may write by then."""
    code = str(seen()["pushed"]["code"])
    *received, _last = re.findall(r"(buf\d+) = .*_push_receive\.default\(", code)
    assert len(received) == code.count("_push_release.default(") == 7
    for name in received:
        (part,) = re.findall(rf"(buf\d+) = {name}\n", code)
        kernel, release, gone = [
            line.strip()
            for line in code.splitlines()
            if re.search(rf"\b{part}\b", line) and not re.search(rf"assert_|{part} = {name}$", line)
        ]
        assert kernel.startswith("cpp_fused_") and "add" in kernel, kernel
        assert re.search(rf"_push_release\.default\(buf\d+, \[{part}\]\)", release) and gone == f"del {part}"


@pytest.mark.parametrize(
    ("tokens", "expected"), [(4680, (2432, 2248)), (512, (256, 256)), (511, (256, 255)), (7, (4, 3)), (2, (1, 1))]
)
def test_the_first_half_is_whole_tiles_where_there_are_many(tokens: int, expected: tuple[int, int]) -> None:
    assert lengths(tokens) == expected


@pytest.mark.parametrize("changed", [{"sequence_parallel": True}, {"cross_attention": True}, {"dropout": 0.1}])
def test_forms_without_halves_are_refused_by_name(changed: dict[str, Any]) -> None:
    options = config_of("wan", "full").model_dump() | changed | {"halves": True}
    with pytest.raises(ValueError, match=f"halves is not there with {next(iter(changed))}"):
        BlockConfig.model_validate(options)


def test_collectives_of_a_training_step_are_not_declared() -> None:
    config = config_in_halves("wan")
    with torch.device("meta"):
        stack = TransformerStack(config, NotSummed(None), num_layers=1)
    stack.comm.size = 2
    with pytest.raises(ConfigError, match="halves is for inference"):
        stack.declared_collectives(1, 8, "float64", train=True)
