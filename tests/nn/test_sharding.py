"""Layouts: slices of all ranks are the full tensor again, whatever is packed, replicated or padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.nn.test_block import OPTIONS, build, config_of
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.layout import Part, ShardSpec
from tpcompile.nn.state import full_state_dict, gather_full, load_full_state_dict
from tpcompile.numerics.draw import draw_stack_weights
from tpcompile.testing import run_on_ranks


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ShardSpec, int]:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    replicas = draw(st.sampled_from([n for n in (1, 2, 4) if tp % n == 0]))
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        own = draw(st.booleans())
        count, unit = draw(st.integers(1, 9)), draw(st.integers(1, 3))
        padded = draw(st.booleans())
        owners = tp if own else tp // replicas
        units = count if padded else count * owners
        parts.append(
            Part(
                units * unit,
                unit=unit,
                replicas=1 if own else replicas,
                padded=padded,
                align=draw(st.sampled_from([1, 8])),
            )
        )
    return ShardSpec(dim=draw(st.integers(0, 1)), parts=tuple(parts)), tp


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_slices_join_to_the_full_tensor_bit_for_bit(layout: tuple[ShardSpec, int]) -> None:
    spec, tp = layout
    shape = [2, 2]
    shape[spec.dim or 0] = sum(spec.sizes)
    full = torch.randn(shape)
    shards = [spec.take(full, rank=rank, size=tp) for rank in range(tp)]
    assert len({shard.shape for shard in shards}) == 1, "ranks have equal shapes"
    assert torch.equal(spec.join(shards), full)
    assert spec.full_shape(shards[0].shape) == tuple(shape)


def test_padding_is_zeros_at_the_end_of_the_last_shares() -> None:
    spec = ShardSpec(dim=0, parts=(Part(6, unit=2, padded=True),))
    shards = [spec.take(torch.ones(6), rank=rank, size=4) for rank in range(4)]
    assert [shard.tolist() for shard in shards] == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_padded_shares_are_aligned_and_even_ones_stay_as_they_are() -> None:
    assert [Part(122, padded=True, align=8).share(tp) for tp in (1, 2, 4)] == [122, 61, 32]
    rows = [Part(20, padded=True, align=8).rows(rank=rank, tp=3) for rank in range(3)]
    assert rows == [(0, 8), (8, 8), (16, 4)]
    assert [Part(5, padded=True, align=8).rows(rank=rank, tp=4) for rank in range(4)] == [
        (0, 5),
        (5, 0),
        (5, 0),
        (5, 0),
    ]


def test_replicas_hold_the_kv_head_of_their_query_heads() -> None:
    spec = ShardSpec(dim=0, parts=(Part(4, unit=2, replicas=2),))
    shards = [spec.take(torch.tensor([0, 0, 1, 1]), rank=rank, size=4) for rank in range(4)]
    assert [shard.tolist() for shard in shards] == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_units_that_do_not_come_out_even_are_refused_unless_padded() -> None:
    with pytest.raises(ConfigError, match=r"heads=3 .*tp=2; .*\[1, 3\]"):
        Part(6, unit=2).share(2, "heads")
    assert Part(6, unit=2, padded=True).share(2) == 4


class _Named(nn.Module):
    """A module filled with its rank's number: what is gathered shows from which rank it came."""

    def __init__(self, spec: ShardSpec, rows: int) -> None:
        super().__init__()
        self.comm = Collectives(dist.group.WORLD)
        self.spec = spec
        self.weight = nn.Parameter(torch.full((rows,), float(self.comm.rank)))

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": self.spec}


def _worker() -> dict[str, Any]:
    found = {}
    for form in OPTIONS:
        config = config_of(form, "full", dtype="float32")
        full = draw_stack_weights(config, seed=0, dtype=torch.float32, device="cpu")
        stack = build(config, Collectives(dist.group.WORLD), full)
        again = full_state_dict(stack)
        found[form] = sorted(again) == sorted(full) and all(torch.equal(again[name], full[name]) for name in full)
        load_full_state_dict(stack, again)
    replicated = _Named(ShardSpec(dim=0, parts=(Part(2, replicas=2),)), 1)
    found["owners"] = full_state_dict(replicated)["weight"].tolist()
    found["grad"] = gather_full("weight", torch.ones(1), module=replicated).tolist()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(_worker, world_size=4)


@pytest.mark.parametrize("form", OPTIONS)
def test_a_full_state_dict_comes_back_bit_for_bit(ranks: list[dict[str, Any]], form: str) -> None:
    assert all(r[form] for r in ranks)


def test_the_first_replica_is_used_for_all_of_them(ranks: list[dict[str, Any]]) -> None:
    assert all(r["owners"] == [0.0, 2.0] and r["grad"] == [1.0, 1.0] for r in ranks)


def test_chunking_a_packed_tensor_is_not_its_slice() -> None:
    spec = ShardSpec(dim=0, parts=(4, 2, 2))
    full: Tensor = torch.arange(8)
    assert spec.take(full, rank=0, size=2).tolist() == [0, 1, 4, 6] != full.chunk(2)[0].tolist()
