"""Where a shard is after a reshape, against the reshape of the whole tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.typecheck.layout import reshaped
from tpcompile.typecheck.spmd import SpmdType, parse_type, varying

WORLD = 3
CASES = [
    ((2, 6, 8), 2, (12, 8)),  # tokens flattened for a matmul
    ((2, 6, 8), 1, (12, 8)),  # sequence parallel, batch first: the shard is merged behind the batch
    ((6, 2, 8), 0, (12, 8)),
    ((2, 6, 8), 2, (2, 6, 2, 4)),  # into heads
    ((2, 6, 2, 4), 2, (2, 6, 8)),  # heads back
    ((2, 6, 2, 4), 2, (12, 8)),
    ((2, 6, 2, 4), 3, (2, 6, 8)),  # inside of every head
    ((4, 6), 0, (2, 2, 6)),
    ((2, 3, 4, 5), 1, (6, 20)),
    ((1, 6, 8), 2, (6, 8)),
    ((2, 6, 1, 4), 2, (2, 6, 4)),  # one head per rank
]


def _whole(shards: list[Tensor], shard: SpmdType) -> Tensor:
    """The tensor the shards are of, by what the type says."""
    assert shard.dim is not None
    before, size, after = shards[0].shape[: shard.dim], shards[0].shape[shard.dim], shards[0].shape[shard.dim + 1 :]
    parts = (shard.left, size // (shard.left * shard.right), shard.right)
    joined = torch.cat([s.reshape(*before, *parts, *after) for s in shards], shard.dim + 1)
    return joined.reshape(*before, size * WORLD, *after)


@pytest.mark.parametrize(("old", "dim", "new"), CASES, ids=str)
def test_a_reshaped_shard_is_a_shard_of_the_reshaped_tensor(
    old: tuple[int, ...], dim: int, new: tuple[int, ...]
) -> None:
    full = tuple(size * WORLD if d == dim else size for d, size in enumerate(old))
    whole = torch.arange(math.prod(full)).reshape(full)
    shards = whole.chunk(WORLD, dim)
    found = reshaped(varying(dim), old, new)
    assert found.dim is not None
    assert torch.equal(_whole([s.reshape(new) for s in shards], found).flatten(), whole.flatten())


@pytest.mark.parametrize(("old", "dim", "new"), CASES, ids=str)
def test_a_reshape_there_and_back_ends_at_the_same_shard(old: tuple[int, ...], dim: int, new: tuple[int, ...]) -> None:
    back = reshaped(reshaped(varying(dim), old, new), new, old)
    assert (back.dim, back.left) == (dim, 1)


def test_one_head_per_rank_is_not_guessed() -> None:
    assert reshaped(varying(2), (2, 6, 4), (2, 6, 1, 4)).dim is None


def test_a_wrong_claim_about_a_shard_is_noticed() -> None:
    whole = torch.arange(2 * 18 * 8).reshape(2, 18, 8)
    shards = [s.reshape(12, 8) for s in whole.chunk(WORLD, 1)]
    right = reshaped(varying(1), (2, 6, 8), (12, 8))
    assert torch.equal(_whole(shards, right).flatten(), whole.flatten())
    assert not torch.equal(_whole(shards, replace(right, left=1)).flatten(), whole.flatten())


def test_types_are_read_as_they_are_written() -> None:
    for text in ("I", "R", "V", "V(1)", "P", "P(max)", "C", "U"):
        assert str(parse_type(text, ndim=2, grad=False)) == text
    assert parse_type("V(-1)", ndim=3, grad=True) == varying(2, grad=True)


@pytest.mark.parametrize("text", ["X", "V(2)", "V(a)", "", "I(0)x"])
def test_an_unknown_type_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SPMD type"):
        parse_type(text, ndim=2, grad=False)
