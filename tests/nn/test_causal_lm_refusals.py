"""Configurations, prompts and caches that a language model cannot take are refused by name, in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tpcompile.block_args import BlockArgs
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.nn.causal_lm import CausalLM, left_padded
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_weights

PROMPTS = torch.zeros(1, 3, dtype=torch.int64)


def _no_rotation(length: int) -> tuple[Tensor, Tensor]:
    return torch.ones(length, 4), torch.zeros(length, 4)


def _args(**change: Any) -> BlockArgs:
    fields = {
        "style": "llama", "dim": 16, "num_heads": 2, "num_kv_heads": 2, "ffn_dim": 8,
        "qk_norm": "none", "bias": False, "causal": True, "eps": 1e-6, "dtype": "float32",
    }  # fmt: skip
    return BlockArgs.model_validate(fields | change)


def _tiny(**change: Any) -> CausalLM:
    model = CausalLM(_args(**change), Collectives(None), num_layers=1, vocab_size=10)
    load_full_state_dict(model, draw_weights(model, seed=0, dtype=torch.float32, device="cpu"))
    return model


def test_a_config_that_a_language_model_cannot_feed_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="norm='layer', modulation=True"):
        CausalLM(_args(norm="layer", modulation=True), Collectives(None), num_layers=1, vocab_size=10)


def test_generating_beyond_the_tables_or_the_caches_is_refused_with_the_numbers() -> None:
    model, tables = _tiny(), _no_rotation(4)
    assert model.generate(PROMPTS, *tables, num_new_tokens=1).shape == (1, 4)
    with pytest.raises(ConfigError, match=r"4 positions; 3 \+ 2 .*5"):
        model.generate(PROMPTS, *tables, num_new_tokens=2)
    with pytest.raises(ConfigError, match=r"5 tokens .*4"):
        model.generate(PROMPTS, *_no_rotation(8), num_new_tokens=2, caches=model.new_caches(1, 4))


@pytest.mark.parametrize(
    ("prompts", "is_token", "text"),
    [
        ([torch.tensor([1, 2]), torch.tensor([3])], None, r"prompts are list, not a tensor \[B, S\]; .*left_padded"),
        (PROMPTS[0], None, r"prompts are \(3,\), not a tensor"),
        (PROMPTS, torch.tensor([[True, True, False]]), r"prompts \[0\] have padding after a token; pad on the left"),
        (PROMPTS, torch.tensor([[True, False, True]]), r"prompts \[0\] have padding after a token"),
        (PROMPTS, torch.tensor([[False, False, False]]), r"prompts \[0\] have padding after a token"),
        (PROMPTS, torch.ones(1, 3), r"is_token_BS is torch.float32 \(1, 3\); pass bool \(1, 3\)"),
    ],
    ids=["list", "one dim", "right", "hole", "empty", "dtype"],
)
def test_prompts_that_would_give_wrong_text_are_refused(prompts: Any, is_token: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        _tiny().generate(prompts, *_no_rotation(8), num_new_tokens=1, is_token_BS=is_token)


def test_padding_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shapes \[\(0,\)\]"):
        left_padded([torch.tensor([1]), torch.tensor([], dtype=torch.int64)])


def test_decoding_in_the_sequence_parallel_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="without sequence_parallel"):
        _tiny(sequence_parallel=True).generate(PROMPTS, *_no_rotation(4), num_new_tokens=1)


def test_a_tied_model_built_on_the_meta_device_stays_tied() -> None:
    with torch.device("meta"):
        model = CausalLM(_args(), Collectives(None), num_layers=1, vocab_size=10, tied=True)
    model.to_empty(device="cpu")
    assert model.head.weight is model.embedding.weight and "head.weight" not in dict(model.named_parameters())
