"""A stack with fast paths computes what it computes without; which ones it has is decided once, before it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.nn.test_block import CASES, config_of
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.fastpath.selection import Decision, ShapeClass
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.fast_paths import use_fast_paths, use_plain_code
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights

F64 = torch.float64


class Answers:
    """Stands for a Selection: notes what it is asked, and answers alike."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.asked: dict[str, tuple[Any, ...]] = {}

    def decide(self, name: str, shapes: Any, dtype: torch.dtype, *, variant: str = "") -> Decision:
        self.asked[name] = (*map(tuple, shapes), dtype, variant)
        shape = ShapeClass.of(shapes, dtype, tp=1, variant=variant)
        return Decision(path=name, shape=shape, is_used=self.is_used, why="it was told to")


def stack_of(config: BlockConfig) -> TransformerStack:
    stack = TransformerStack(config, Collectives(None), num_layers=config.num_layers).double()
    load_full_state_dict(stack, draw_stack_weights(config, seed=0, dtype=F64, device=torch.device("cpu")))
    return stack


def results(stack: TransformerStack, config: BlockConfig) -> list[Tensor]:
    inputs = draw_inputs(config, seed=1, device="cpu", dtype=F64, seq_len=config.seq_len)
    inputs.x_BSD.requires_grad_()
    output = stack(*inputs)
    output.square().sum().backward()
    return [output, inputs.x_BSD.grad, *(parameter.grad for parameter in stack.parameters())]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_plain_code_in_its_place_computes_the_same(case: tuple[str, str]) -> None:
    config = config_of(*case)
    stack, other = stack_of(config), stack_of(config)
    use_plain_code(other)
    for expected, found in zip(results(stack, config), results(other, config), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_each_place_is_asked_for_its_own_shapes_and_gets_the_fast_path() -> None:
    pytest.importorskip("triton")
    config = config_of("wan", "full")
    stack, answers = stack_of(config), Answers(is_used=True)
    decisions = use_fast_paths(stack, answers, batch=2, seq_len=6, train=True)  # type: ignore[arg-type]
    assert set(decisions) == set(answers.asked) == {"qk_norm_rope", "add_rms_norm"}
    width, pairs = config.dim, config.head_dim // 2
    assert answers.asked["qk_norm_rope"] == ((2, 6, width), (2, 6, width), (6, pairs), F64, "train")
    assert answers.asked["add_rms_norm"] == ((2, 6, width), F64, "train")
    assert [layer.attention.fast_path.__name__ for layer in stack.layers] == ["qk_norm_rope"] * len(stack.layers)
    use_fast_paths(stack, Answers(is_used=False), batch=2, seq_len=6, train=False)  # type: ignore[arg-type]
    assert all(layer.fast_path is None and layer.attention.fast_path is None for layer in stack.layers)
