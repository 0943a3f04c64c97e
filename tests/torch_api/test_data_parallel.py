"""FSDP2 and DDP train on parameters that hold nothing; each name that is replaced is one that they need."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tpcompile.torch_api.data_parallel import on_empty_tensors
from tpcompile.typecheck.check import fake_ranks

META = torch.device("meta")


def trained(wrapper: str) -> list[torch.Tensor | None]:
    """Gradients after two steps on two fake ranks: with the second, DDP would make its buckets again."""
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(META)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):
        model(torch.randn(2, 4, device=META)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_parameters_on_meta_are_trained(wrapper: str) -> None:
    with fake_ranks(2), on_empty_tensors(META):
        gradients = trained(wrapper)
    assert len(gradients) == 4
    assert all(gradient is not None and gradient.is_meta for gradient in gradients)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_torch_itself_refuses_them(wrapper: str) -> None:
    with fake_ranks(2), pytest.raises(RuntimeError, match="meta"):
        trained(wrapper)
