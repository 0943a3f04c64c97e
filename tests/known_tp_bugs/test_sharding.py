"""Known TP bugs of biases, shards, seeds and tolerances: 10, 11, 13, 15, 17."""

# B batch, S sequence, I input features, O output features; i = I / tp, this rank's share
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graphs import GraphCapture
from tests.known_tp_bugs.criteria import errors_of, first_three, skewed, wrong
from tests.known_tp_bugs.job import Found
from tpcompile.collectives import all_gather_single, reduce_scatter_single
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError
from tpcompile.layout import ShardSpec
from tpcompile.nn.attention import Attention
from tpcompile.nn.dropout import Dropout
from tpcompile.nn.linear import ColumnParallelLinear, RowParallelLinear
from tpcompile.nn.mlp import SwiGLU
from tpcompile.numerics.draw import draw_inputs
from tpcompile.numerics.single_device import Reference
from tpcompile.testing import run_on_ranks

NUM_IN, NUM_OUT, HEADS = 5120, 256, 40
BLOCK = BlockConfig(
    style="llama", dim=128, num_heads=8, num_kv_heads=8, ffn_dim=256, num_layers=1, qk_norm="full", bias=True,
    causal=True, eps=1e-6, batch=2, seq_len=8, dtype="float32",
)  # fmt: skip


class UserRowLinear(nn.Module):
    """Row-parallel linear of [B, S, I / tp]; its forms differ in where the bias comes in."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(NUM_OUT, NUM_IN // comm.size))
        self.bias = nn.Parameter(torch.empty(NUM_OUT))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(dim=1, parts=(NUM_IN,)), "bias": ShardSpec()}


class BiasOnEveryRank(UserRowLinear):
    """Known TP bug 10."""

    def forward(self, x_BSi: Tensor) -> Tensor:
        return self.comm.all_reduce(F.linear(x_BSi, self.weight, self.bias), dst="I")


class BiasOnRankZero(UserRowLinear):
    """Known TP bug 10: right numbers, addmm on one rank and mm on the others."""

    def forward(self, x_BSi: Tensor) -> Tensor:
        bias = self.bias if self.comm.rank == 0 else None
        return self.comm.all_reduce(F.linear(x_BSi, self.weight, bias), dst="I")


class Float16Reduce(UserRowLinear):
    """Known TP bug 11: a float32 layer whose partial sums travel in half the bits."""

    def forward(self, x_BSi: Tensor) -> Tensor:
        y_BSO = F.linear(x_BSi, self.weight)
        if self.comm.size > 1:
            y_BSO = self.comm.all_reduce(y_BSO.half(), dst="I").to(x_BSi.dtype)
        return y_BSO + self.bias


def _ours(comm: Collectives) -> nn.Module:
    return RowParallelLinear(NUM_IN, NUM_OUT, bias=True, comm=comm)


def _row_reference(build: Any, dtype: torch.dtype = torch.float32, *, train: bool = False) -> Reference:
    return Reference(build, skewed(2, 16, NUM_IN, num_heads=HEADS), dtype=dtype, sharded={"input": -1}, train=train)


def biases(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 10: errors and Dynamo's graph."""
    found = {}
    for name, form in (("every rank", BiasOnEveryRank), ("rank 0", BiasOnRankZero), ("ours", _ours)):
        torch._dynamo.reset()
        capture = GraphCapture()
        errors = errors_of(_row_reference(form), comm, backend=capture)
        found[name] = {"errors": errors, "texts": capture.texts}
    return found


def divided_bias(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 10: bias / 3 on each of three ranks in bf16; the input is zeros, so the output is the bias."""
    three = first_three()
    if three is None:
        return {}
    module = RowParallelLinear(NUM_OUT * 3, NUM_OUT, bias=True, comm=three, dtype=torch.bfloat16)
    with torch.no_grad():
        module.weight.zero_()
        module.bias.copy_(torch.linspace(-1, 1, NUM_OUT))
        x_BSi = torch.zeros(1, 1, NUM_OUT, dtype=torch.bfloat16)
        mistake = three.all_reduce(F.linear(x_BSi, module.weight, module.bias / 3))
        bias = module.bias.detach()
        return {"mistake": (mistake - bias).abs().max().item(), "ours": (module(x_BSi) - bias).abs().max().item()}


def tolerances(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 11: largest absolute error, and errors as ratios, of a right bf16 and a wrong float32 layer."""
    found = {}
    for name, reference in (("right", _row_reference(_ours, torch.bfloat16)), ("wrong", _row_reference(Float16Reduce))):
        module = reference.place(comm)
        got = reference.run(module, module, comm)
        largest = (got.output.double() - reference.exact.output).abs().max().item()
        found[name] = {"largest": largest, "errors": reference.errors(module, got, comm)}
    return found


def packed(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 13: a packed weight loaded by `chunk` of the whole, and by parts."""
    x, cos, sin = draw_inputs(BLOCK, seed=1, device="cpu", dtype=torch.float32, seq_len=BLOCK.seq_len)[:3]
    forms = {
        "wqkv": (lambda comm: Attention(BLOCK, comm), (x, cos, sin)),
        "gate_up": (lambda comm: SwiGLU(BLOCK, comm), (x,)),
    }
    found = {}
    for name, (build, inputs) in forms.items():
        reference = Reference(build, lambda dtype, inputs=inputs: inputs, dtype=torch.float32, train=False)
        module = reference.place(comm)
        with torch.no_grad():
            for kind in ("weight", "bias"):
                full = reference.full[f"{name}.{kind}"]
                getattr(module.get_submodule(name), kind).copy_(full.chunk(comm.size)[comm.rank])
        found[name] = {"mistake": errors_of(reference, comm, module=module), "ours": errors_of(reference, comm)}
    return found


def dropout(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 15."""

    def judged(sharded: Callable[..., Tensor], replicated: Callable[..., Tensor]) -> dict[str, bool]:
        shards = comm.all_gather(sharded(torch.ones(4, 16, 128)), dim=-1)
        replicas = comm.all_gather(replicated(torch.ones(4, 16, 256)), dim=-1)
        one, other = shards.chunk(2, -1)
        first, second = replicas.chunk(2, -1)
        return {"shards differ": not torch.equal(one, other), "replicas agree": torch.equal(first, second)}

    def seeded(seed: int) -> Callable[..., Tensor]:
        torch.manual_seed(seed)
        return lambda x: F.dropout(x, 0.3)

    seed = torch.tensor([7])
    ours = [Dropout(0.3, site=0, comm=comm, sharded_dim=dim) for dim in (-1, None)]
    alone = Dropout(0.3, site=0, comm=Collectives(None))(torch.ones(4, 16, 256), seed)
    gathered = comm.all_gather(ours[0](torch.ones(4, 16, 128), seed), dim=-1)
    return {
        "one seed": judged(seeded(7), seeded(7)),
        "seed_per_rank": judged(seeded(comm.rank), seeded(comm.rank)),
        "ours": judged(*(lambda x, drop=drop: drop(x, seed) for drop in ours)),
        "is_single_device": torch.equal(gathered, alone),
    }


def _uneven(comm: Collectives) -> tuple[Tensor, Tensor]:
    """Three rows on rank 0 and five on rank 1, and what gathering them gives."""
    full = torch.arange(16.0).view(8, 2)
    return full.split([3, 5])[comm.rank], full


def stated_sizes(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 17, ours."""
    x, full = _uneven(comm)
    refused = []
    for call in (
        lambda: all_gather_single(x, dim=0, group=comm.group, sizes=[4, 4]),
        lambda: reduce_scatter_single(torch.ones(7, 2), dim=0, group=comm.group),
        lambda: ColumnParallelLinear(16, 7, bias=False, comm=comm),
    ):
        try:
            call()
        except ConfigError as error:
            refused.append(str(error))
    gathered = all_gather_single(x, dim=0, group=comm.group, sizes=[3, 5])
    return {"refused": refused, "right": torch.equal(gathered, full)}


def uneven_funcol() -> bool:
    """Known TP bug 17, the mistake: on ranks of its own, it may end them."""
    comm, ops = Collectives(dist.group.WORLD), torch.ops._c10d_functional
    x, full = _uneven(comm)
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(x, comm.size, comm.group.group_name))
    return torch.equal(gathered, full)


ON_RANKS = {
    2: (biases, packed, dropout, stated_sizes),
    4: (divided_bias, tolerances),
}


def test_bug_10_a_bias_before_the_reduce_counts_once_per_rank(two_ranks: Found) -> None:
    assert wrong([r["every rank"]["errors"] for r in two_ranks["biases"]])["forward"] > 0.01
    assert wrong([r["ours"]["errors"] for r in two_ranks["biases"]]) == {}


def test_bug_10_a_bias_on_rank_zero_alone_gives_the_ranks_different_graphs(two_ranks: Found) -> None:
    one, other = two_ranks["biases"]
    assert wrong([one["rank 0"]["errors"], other["rank 0"]["errors"]]) == {}, "no number shows it"
    assert one["rank 0"]["texts"] != other["rank 0"]["texts"]
    assert one["ours"]["texts"] == other["ours"]["texts"]


def test_bug_10_a_bias_divided_by_three_ranks_is_rounded_in_bf16(four_ranks: Found) -> None:
    ranks = [r for r in four_ranks["divided_bias"] if r]
    assert [r["ours"] for r in ranks] == [0, 0, 0]
    assert all(r["mistake"] > 1e-4 for r in ranks)


def test_bug_11_no_fixed_tolerance_passes_a_right_bf16_layer_and_fails_a_wrong_float32_one(
    four_ranks: Found,
) -> None:
    right, wrongs = ([r[name] for r in four_ranks["tolerances"]] for name in ("right", "wrong"))
    assert min(r["largest"] for r in right) > max(r["largest"] for r in wrongs) > 0
    assert wrong([r["errors"] for r in right]) == {}
    assert set(wrong([r["errors"] for r in wrongs])) == {"forward"}


@pytest.mark.parametrize("name", ["wqkv", "gate_up"])
def test_bug_13_a_chunk_of_a_packed_weight_mixes_its_parts(two_ranks: Found, name: str) -> None:
    assert wrong([r[name]["mistake"] for r in two_ranks["packed"]])["forward"] > 0.3
    assert wrong([r[name]["ours"] for r in two_ranks["packed"]]) == {}


def test_bug_15_one_seed_drops_equal_places_of_all_shards_and_a_seed_per_rank_splits_replicas(
    two_ranks: Found,
) -> None:
    for r in two_ranks["dropout"]:
        assert r["one seed"] == {"shards differ": False, "replicas agree": True}
        assert r["seed_per_rank"] == {"shards differ": True, "replicas agree": False}
        assert r["ours"] == {"shards differ": True, "replicas agree": True} and r["is_single_device"]


def test_bug_17_an_uneven_functional_gather_never_gives_the_gathered_tensor() -> None:
    try:
        results = run_on_ranks(uneven_funcol, timeout_s=60, collective_timeout_s=5)
    except RuntimeError as error:
        assert re.search("gloo|without a traceback", str(error)), "not for another reason"
    else:
        assert results == [False, False]


def test_bug_17_uneven_sizes_are_stated_or_refused_before_any_rank_communicates(two_ranks: Found) -> None:
    for r in two_ranks["stated_sizes"]:
        assert r["right"] and len(r["refused"]) == 3
        assert "sizes=[4, 4]" in r["refused"][0]
