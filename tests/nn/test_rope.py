"""RoPE tables against those of transformers and diffusers, and the types that are left to the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from examples.checkpoints import llama, wan, wan_original
from tpcompile.errors import ConfigError
from tpcompile.nn.rope import rope_tables, video_rope_tables

VIDEO, GRID = (2, 3, 2, 6, 4), (2, 3, 2)  # batch, channels, frames, height, width; patches of 1 x 2 x 2


@pytest.mark.parametrize("head_size", [14, 12, 16])
def test_video_tables_are_those_of_diffusers(head_size: int) -> None:
    wan_model = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    theirs = wan_model.WanRotaryPosEmbed(head_size, (1, 2, 2), 32)(torch.zeros(VIDEO))
    ours = video_rope_tables(head_size, GRID)
    for table, (start, expected) in zip(ours, enumerate(theirs), strict=True):
        torch.testing.assert_close(table, expected[0, :, 0, start::2].float(), rtol=0, atol=1e-6)
    assert not torch.allclose(video_rope_tables(head_size, (3, 2, 2))[0], ours[0])


def test_wan_original_tables_are_those_of_its_head_size() -> None:
    ours, original = (
        wan.rope_tables({"attention_head_dim": 14}, GRID),
        wan_original.rope_tables({"dim": 56, "num_heads": 4}, GRID),
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, original, strict=True))


ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPE_TYPES)
def test_llama_tables_are_those_of_transformers(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options = {"rope_type": kind, "rope_theta": 5e5} | ROPE_TYPES[kind]
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(options)
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(20)[None])
    del options["rope_theta"]
    old_file = {"hidden_size": 64, "num_attention_heads": 2, "rope_theta": 5e5, "rope_scaling": options}
    for given in (config, config.to_dict(), old_file):
        for table, expected in zip(llama.rope_tables(given, 20), theirs, strict=True):
            torch.testing.assert_close(table, expected[0, :, :16], rtol=0, atol=2e-6)
    plain = rope_tables(32, 20, base=5e5)[0]
    assert torch.allclose(plain, llama.rope_tables(config, 20)[0], atol=2e-6) == (kind == "default")


@pytest.mark.parametrize("change", [{"rope_type": "yarn", "factor": 2.0}, {"partial_rotary_factor": 0.5}])
def test_tables_of_other_rope_types_are_left_to_the_caller(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(change.values())))):
        llama.rope_tables({"hidden_size": 8, "num_attention_heads": 4, "rope_parameters": change}, 4)


def test_sizes_that_make_no_pairs_or_no_grid_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 elements"):
        rope_tables(7, 4)
    with pytest.raises(ConfigError, match=r"grid=\(2, 3\), head size 14"):
        video_rope_tables(14, (2, 3))
