from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tpcompile.ranks.env import RankEnv, process_group


@pytest.mark.parametrize(("shares_gpu", "backend"), [(False, "nccl"), (True, "gloo")])
def test_ranks_that_share_a_gpu_use_gloo_however_many_there_are(
    shares_gpu: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL refuses two ranks on one GPU."""
    started: dict[str, Any] = {}

    def init_process_group(name: str, **options: Any) -> None:
        started.update(options, backend=name)
        dist_init("gloo", **{**options, "device_id": None})

    dist_init = dist.init_process_group
    monkeypatch.setattr(dist, "rendezvous", lambda *given, **options: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = torch.device("cuda", 0)
    env = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1)
    with process_group(env, device, shares_gpu=shares_gpu, timeout_s=10.0):
        assert started["backend"] == backend
        assert started["device_id"] == (None if shares_gpu else device)
