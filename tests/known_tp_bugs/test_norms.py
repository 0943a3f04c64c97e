"""Known TP bugs of norm statistics over sharded activations: 4, 5, 6, 7, 8, 14."""

# B batch, S sequence, D normalised width, E head size; d = D / tp, this rank's share
from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.known_tp_bugs.criteria import errors_of, first_three, skewed, wrong
from tests.known_tp_bugs.job import Found
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.fastpath.plain import stat_dtype
from tpcompile.layout import ShardSpec
from tpcompile.nn.attention import Attention, HeadLayout
from tpcompile.nn.norm import DistributedRMSNorm
from tpcompile.numerics.draw import draw_inputs
from tpcompile.numerics.error_ratio import error_of
from tpcompile.numerics.single_device import Reference
from tpcompile.recording import CaptureSession
from tpcompile.recording.foreign import foreign_ops

HEADS, EPS = 40, 1e-6
WIDTH = HEADS * 128
SHARDED = {"input": -1, "forward": -1}
BF16_TOLERANCE = 2e-2
SAME_STATISTICS = 1.05
WAN = BlockConfig(
    style="wan", dim=WIDTH, num_heads=HEADS, num_kv_heads=HEADS, ffn_dim=13824, num_layers=1, qk_norm="full", bias=True,
    causal=False, eps=EPS, batch=1, seq_len=8, dtype="float32", uneven="pad",
)  # fmt: skip
GROUPED = BlockConfig(
    style="llama", dim=128, num_heads=8, num_kv_heads=2, ffn_dim=256, num_layers=1, qk_norm="full", bias=True,
    causal=True, eps=EPS, batch=2, seq_len=8, dtype="float32",
)  # fmt: skip


class UserNorm(nn.Module):
    """RMSNorm of [B, S, D] over the full width, sharded on it; its forms differ in `mean_square`."""

    def __init__(self, comm: Collectives) -> None:
        super().__init__()
        self.comm = comm
        self.weight = nn.Parameter(torch.empty(WIDTH // comm.size))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(dim=0, parts=(WIDTH,))}

    def forward(self, x_BSd: Tensor) -> Tensor:
        wide_BSd = x_BSd.to(stat_dtype(x_BSd.dtype))
        return (wide_BSd * torch.rsqrt(self.mean_square(wide_BSd) + EPS)).to(x_BSd.dtype) * self.weight


class ShardLocalNorm(UserNorm):
    """Known TP bug 4."""

    def mean_square(self, x_BSd: Tensor) -> Tensor:
        return x_BSd.square().mean(-1, keepdim=True)


class Bf16StatisticsNorm(UserNorm):
    """Known TP bug 7: the sum travels in the activation dtype."""

    def mean_square(self, x_BSd: Tensor) -> Tensor:
        sum_1 = x_BSd.square().sum(-1, keepdim=True)
        if self.comm.size > 1:
            sum_1 = self.comm.all_reduce(sum_1.bfloat16(), dst="R").float()
        return sum_1 / WIDTH


class DroppedResultNorm(UserNorm):
    """Known TP bug 8: the all-reduce is out of place, and its result goes nowhere."""

    def mean_square(self, x_BSd: Tensor) -> Tensor:
        sum_1 = x_BSd.square().sum(-1, keepdim=True)
        if self.comm.size > 1:
            funcol.all_reduce(sum_1, "sum", dist.group.WORLD)
        return sum_1 / WIDTH


@torch.library.custom_op("tpcompile_known_bugs::fused_norm", mutates_args=())
def fused_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Known TP bug 14: a fused kernel's mean is over the width it sees."""
    wide = x.to(stat_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


@fused_norm.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


class FusedNorm(UserNorm):
    """Known TP bug 14, right on one device."""

    def forward(self, x_BSd: Tensor) -> Tensor:
        return fused_norm(x_BSd, self.weight)


def _ours(comm: Collectives) -> nn.Module:
    return DistributedRMSNorm(WIDTH, eps=EPS, comm=comm)


def _reference(build: Any, *, values: Any = "skewed", **options: Any) -> Reference:
    inputs = skewed(2, 16, WIDTH, num_heads=HEADS, values=values)
    return Reference(build, inputs, sharded=SHARDED, values=values, **({"dtype": torch.float32} | options))


def local_statistics(comm: Collectives) -> dict[Any, Any]:
    """Known TP bugs 4 and 8, on iid and on head-skewed data."""
    forms = {"local": ShardLocalNorm, "dropped": DroppedResultNorm, "ours": _ours}
    return {(f, v): errors_of(_reference(forms[f], values=v), comm) for f in forms for v in ("iid", "skewed")}


def bf16_statistics(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 7; weights of one add no rounding of their own."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "train": False, "weights": {"weight": torch.ones(WIDTH)}}
    build = {"mistake": Bf16StatisticsNorm, "ours": _ours}
    return {k: errors_of(_reference(b, **options), comm) for k, b in build.items()}


def fused_kernel(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 14: errors under compile, and the custom ops in its graphs."""
    found: dict[str, Any] = {}
    for name, build in (("mistake", FusedNorm), ("ours", _ours)):
        torch._dynamo.reset()
        with CaptureSession() as session:
            errors = errors_of(_reference(build, train=False), comm, backend="aot_eager")
        found[name] = {
            "errors": errors,
            "foreign": [i.text for i in foreign_ops(session.compiles())],
        }
    return found


def mean_of_means(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 5, on three of the four ranks."""
    three = first_three()
    if three is None:
        return {}
    (x_BSD,) = skewed(2, 16, WIDTH, num_heads=HEADS)(torch.float32)
    sizes = [heads * 128 for heads in (14, 13, 13)]
    x_BSd = x_BSD.split(sizes, -1)[three.rank]
    mean_1 = x_BSd.square().mean(-1, keepdim=True)
    dist.all_reduce(mean_1, group=three.group)
    single, exact = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) for x in (x_BSD, x_BSD.double()))
    mistake = error_of(
        x_BSd * torch.rsqrt(mean_1 / 3 + EPS), single.split(sizes, -1)[three.rank], exact.split(sizes, -1)[three.rank]
    )
    padded = ShardSpec(dim=2, parts=(HeadLayout.of(WAN, 3).q,))
    reference = Reference(
        lambda comm: DistributedRMSNorm(HeadLayout.of(WAN, comm.size).q, eps=EPS, comm=comm),
        skewed(2, 16, WIDTH, num_heads=HEADS), dtype=torch.float32, sharded={"input": padded, "forward": padded},
    )  # fmt: skip
    return {"mistake": {"forward": mistake}, "ours": errors_of(reference, three)}


class NoReplicaSum(Collectives):
    """Known TP bug 6: every rank updates its copy of a kv head by what it saw itself."""

    def replicas(self, count: int) -> Collectives:
        return Collectives(None)


def replicated_kv_heads(comm: Collectives) -> dict[str, Any]:
    """Known TP bug 6: two kv heads on four ranks."""
    reference = Reference(
        lambda comm: Attention(GROUPED, comm),
        lambda dtype: draw_inputs(GROUPED, seed=1, device="cpu", dtype=dtype, seq_len=GROUPED.seq_len)[:3],
        dtype=torch.float32, differentiate=["input"],
    )  # fmt: skip
    counted_once, by_rank = reference.place(comm), reference.place(comm)
    counted_once.qk_norm.k_norm.num_summed = GROUPED.num_kv_heads * GROUPED.head_dim
    full = reference.full["qk_norm.k_norm.weight"].chunk(GROUPED.num_kv_heads)
    with torch.no_grad():
        by_rank.qk_norm.k_norm.weight.copy_(full[comm.rank % GROUPED.num_kv_heads])
    return {
        "denominator": errors_of(reference, comm, module=counted_once),
        "by_rank": errors_of(reference, comm, module=by_rank),
        "no replica sum": errors_of(reference, NoReplicaSum(comm.group)),
        "ours": errors_of(reference, comm),
    }


# replicated_kv_heads first, see `first_three`.
ON_RANKS = {2: (local_statistics, bf16_statistics, fused_kernel), 4: (replicated_kv_heads, mean_of_means)}


def test_bug_04_a_shard_local_norm_hides_on_iid_data_and_shows_on_skewed_data(two_ranks: Found) -> None:
    on_iid, on_skewed = ([r["local", v] for r in two_ranks["local_statistics"]] for v in ("iid", "skewed"))
    assert 1e-3 < max(r["forward"]["error"] for r in on_iid) < BF16_TOLERANCE, "a bf16 tolerance does not see it"
    assert wrong(on_skewed)["forward"] > 0.3
    assert wrong([r["ours", v] for r in two_ranks["local_statistics"] for v in ("iid", "skewed")]) == {}


def test_bug_05_averaging_local_means_of_unequal_shards_is_wrong_and_padding_is_not(four_ranks: Found) -> None:
    ranks = [r for r in four_ranks["mean_of_means"] if r]
    assert 3e-3 < wrong([r["mistake"] for r in ranks])["forward"] < 5e-2
    assert len(ranks) == 3 and wrong([r["ours"] for r in ranks]) == {}


def test_bug_06_dividing_by_the_kv_width_counts_replicated_heads_twice(four_ranks: Found) -> None:
    off = wrong([r["denominator"] for r in four_ranks["replicated_kv_heads"]])
    assert off["forward"] > 0.01


def test_bug_06_a_k_norm_weight_indexed_by_rank_is_that_of_a_different_head(four_ranks: Found) -> None:
    ranks = four_ranks["replicated_kv_heads"]
    assert wrong([r["by_rank"] for r in ranks])["forward"] > 0.01


def test_bug_06_replicated_kv_weights_without_the_sum_over_replicas_get_part_of_their_gradient(
    four_ranks: Found,
) -> None:
    off = wrong([r["no replica sum"] for r in four_ranks["replicated_kv_heads"]])
    assert set(off) == {"grad wqkv.weight", "grad wqkv.bias", "grad qk_norm.k_norm.weight"}
    assert min(off.values()) > 0.1


def test_bug_06_ours_is_right_with_two_kv_heads_on_four_ranks(four_ranks: Found) -> None:
    assert wrong([r["ours"] for r in four_ranks["replicated_kv_heads"]]) == {}


def test_bug_07_statistics_summed_in_bf16_cost_accuracy_that_float32_ones_do_not(two_ranks: Found) -> None:
    # Both pass the ratio, whose floor is a quarter ulp; but a norm sums no activations over ranks, so equality is due.
    mistake, ours = (
        [r[name]["forward"]["error"] / r[name]["forward"]["single"] for r in two_ranks["bf16_statistics"]]
        for name in ("mistake", "ours")
    )
    assert max(mistake) > SAME_STATISTICS >= max(ours)


@pytest.mark.parametrize("values", ["iid", "skewed"])
def test_bug_08_a_dropped_all_reduce_result_divides_a_local_sum_by_the_global_width(
    two_ranks: Found, values: str
) -> None:
    ranks = two_ranks["local_statistics"]
    assert wrong([r["dropped", values] for r in ranks])["forward"] > 0.1
    assert wrong([r["ours", values] for r in ranks]) == {}


def test_bug_14_a_fused_norm_sees_a_local_width_and_is_reported(two_ranks: Found) -> None:
    for r in two_ranks["fused_kernel"]:
        assert wrong([r["mistake"]["errors"]])["forward"] > 0.2
        assert r["mistake"]["foreign"][0].startswith("tpcompile_known_bugs::fused_norm")
        assert wrong([r["ours"]["errors"]]) == {} and r["ours"]["foreign"] == []
