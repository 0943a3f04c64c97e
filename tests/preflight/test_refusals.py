"""Arguments that make no sense are refused at once, without waiting for a rank; one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.errors import ConfigError
from tpcompile.evidence.records import Status
from tpcompile.preflight import Handshake, InputCheck, check_setup, sdpa_backend
from tpcompile.preflight.weights import Group, Layout, weights_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[dist.Store]:
    """A gloo group of this process alone, and its store."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_without_a_process_group_there_is_nothing_to_compare() -> None:
    with pytest.raises(ConfigError, match="init_process_group"):
        check_setup()


def test_one_rank_agrees_with_itself(store: dist.Store) -> None:
    assert check_setup(nn.Linear(2, 2), store=store, timeout_s=5).status == Status.PASS
    assert InputCheck(store=store, timeout_s=5).check(torch.ones(2), flag=True).status == Status.PASS


def test_no_store_is_guessed(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="pass store="):
        check_setup()


def test_an_unknown_axis_is_named_with_those_there_are(store: dist.Store) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    with pytest.raises(ConfigError, match=r"'dp'; .*\['tp'\]"):
        check_setup(mesh=mesh, axis="dp", store=store)


@pytest.mark.parametrize("entry", [("environment", "NCCL", ""), ("enviroment", "NCCL", "why"), ("inputs", "", "why")])
def test_an_allowed_entry_needs_a_layer_a_text_and_a_reason(store: dist.Store, entry: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        check_setup(store=store, allow=[entry])


def test_a_recheck_needs_frozen_weights_and_a_check_before(store: dist.Store) -> None:
    with pytest.raises(ConfigError, match="frozen=True"):
        Handshake(nn.Linear(2, 2), store=store).recheck()
    with pytest.raises(ConfigError, match=r"call check\(\) first"):
        Handshake(nn.Linear(2, 2), store=store, frozen=True).recheck()


@pytest.mark.parametrize(
    ("sharded", "weight", "bias"),
    [
        (None, Layout.UNDECLARED, Layout.UNDECLARED),
        ([], Layout.REPLICATED, Layout.REPLICATED),
        (["*weight"], Layout.SHARDED, Layout.REPLICATED),
        ("*weight", Layout.SHARDED, Layout.REPLICATED),
        ({"*weight": (8, 2)}, Layout.SHARDED, Layout.REPLICATED),
        (lambda name, tensor: tensor.dim() == 2, Layout.SHARDED, Layout.REPLICATED),
    ],
)
def test_what_the_caller_does_not_call_a_shard_is_replicated(sharded, weight: Layout, bias: Layout) -> None:
    found = weights_of(nn.Sequential(nn.Linear(2, 2)), group=Group("tp", (0, 1)), sharded=sharded)
    assert (found["0.weight"].layout, found["0.bias"].layout) == (weight, bias)
    assert bool(found["0.weight"].print) == (weight != Layout.SHARDED)


def test_the_attention_backend_is_asked_for_the_tensors_at_hand() -> None:
    assert sdpa_backend(*[torch.zeros(1, 2, 16, 8)] * 3, is_causal=True) in {"FLASH_ATTENTION", "MATH"}
