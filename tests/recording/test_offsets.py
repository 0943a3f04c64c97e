"""A rank that takes its part of a tensor has a view that begins elsewhere in memory: no difference, on any layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.evidence.samples import divergences
from tpcompile.evidence.records import RankRecord
from tpcompile.evidence.records.causes import Cause
from tpcompile.recording import CaptureSession


def record(rank: int, backend: str, *, doubled: bool = False) -> RankRecord:
    """Three calls with the rank's part of a tensor, of other lengths each; Torch makes length and offset dynamic."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight_DD = torch.randn(6, 6, requires_grad=True)

    def layer(x_LD: Tensor) -> Tensor:
        y_LD = x_LD @ weight_DD
        return torch.relu(y_LD + y_LD if doubled else y_LD)

    compiled = torch.compile(layer, backend=backend)
    with CaptureSession() as session, session.phase("steps"):
        for length in (8, 6, 4):
            part_LD = torch.randn(32, 6)[rank * length : (rank + 1) * length]
            compiled(part_LD).sum().backward()
    return session.record(rank=rank, world_size=2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_views_at_other_offsets_are_equal(backend: str) -> None:
    found = divergences(*(record(rank, backend) for rank in range(2)))
    assert [one.title for one in found if one.cause != Cause.CACHE_SPLIT] == []  # what is equal comes from the cache


def test_a_different_program_behind_a_different_offset_is_seen() -> None:
    found = divergences(record(0, "aot_eager"), record(1, "aot_eager", doubled=True))
    assert any(divergence.is_red for divergence in found)
