"""Memory that other ranks can write: torch's names are there, and an address counts the offset in its allocation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tpcompile.torch_api import symmetric


def test_only_memory_of_a_gpu_can_be_shared() -> None:
    assert symmetric.can_share(torch.device("cuda", 0))
    assert not symmetric.can_share(torch.device("cpu"))


def test_torch_still_has_the_names() -> None:
    symm = pytest.importorskip("torch.distributed._symmetric_memory")
    assert callable(symm.empty) and callable(symm.rendezvous) and callable(symm.enable_symm_mem_for_group)
    assert callable(torch._C._distributed_c10d._SymmetricMemory.has_multicast_support)
    assert torch.ops.symm_mem.one_shot_all_reduce_copy and torch.ops.symm_mem.two_shot_all_reduce_out
    assert hasattr(torch._C._distributed_c10d._SymmetricMemory, "buffer_ptrs")


def test_words_are_zero_and_addresses_count_the_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    symm = pytest.importorskip("torch.distributed._symmetric_memory")
    handle = SimpleNamespace(buffer_ptrs=[1000, 2000], offset=64)
    monkeypatch.setattr(symm, "empty", lambda *shape, dtype, device: torch.full(shape, 7, dtype=dtype, device=device))
    monkeypatch.setattr(symm, "rendezvous", lambda words, group: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group: Any = object()
    with mock.patch("torch.distributed.barrier") as barrier:
        shared = symmetric.zeros(3, group=group, device=torch.device("cpu"))
    assert shared.words.tolist() == [0, 0, 0] and shared.words.dtype == torch.int64
    assert shared.addresses == [1064, 2064] and shared.handle is handle
    barrier.assert_called_once_with(group=group)
