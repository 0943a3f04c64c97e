"""The floor of a block: its FLOPs and its weights, per rank."""

from __future__ import annotations

import pytest

from tpcompile import config
from tpcompile.bench.floors import bound, products
from tpcompile.bench.records import Floors


def test_a_wan_block_has_the_flops_of_its_linears_and_of_its_attention() -> None:
    block = config.load("wan14b", ["block.num_layers=4"]).block
    found = bound(block, Floors(gemm_tflops=784, read_gbytes_per_s=4300), tp=2, train=False)
    linears = 2 * 4680 * 5120 * (4 * 5120 + 2 * 13824)
    assert found.flops == 4 * (linears + 4 * 4680 * 4680 * 5120) / 2
    assert found.flops_ms == pytest.approx(7.0, abs=0.1)
    assert found.ms == found.flops_ms


def test_few_tokens_are_bound_by_the_weights_of_a_rank() -> None:
    block = config.load("wan14b_8", ["block.num_layers=4"]).block
    found = bound(block, Floors(gemm_tflops=784, read_gbytes_per_s=4300), tp=2, train=False)
    assert found.weight_bytes == 4 * 5120 * (4 * 5120 + 2 * 13824) * 2 // 2
    assert found.ms == found.bytes_ms == pytest.approx(0.23, abs=0.01)


def test_training_has_three_passes() -> None:
    block = config.load("llama8b").block
    once, thrice = (
        bound(block, Floors(gemm_tflops=1, read_gbytes_per_s=1), tp=2, train=train) for train in (False, True)
    )
    assert (thrice.flops, thrice.weight_bytes) == (3 * once.flops, 3 * once.weight_bytes)


def test_a_causal_mask_hides_half_of_the_attention_and_kv_heads_are_fewer() -> None:
    block = config.load("llama8b").block
    whole = block.model_copy(update={"causal": False})
    flops = [bound(one, Floors(gemm_tflops=1, read_gbytes_per_s=1), tp=1, train=False).flops for one in (whole, block)]
    assert flops[0] - flops[1] == 2 * 2048 * 2048 * 4096 * block.num_layers
    shapes = {shape.name: (shape.n, shape.k) for shape in products(block, 2)}
    assert shapes["qkv"] == ((4096 + 2 * 1024) // 2, 4096)
    assert shapes["up"] == (14336, 4096)
