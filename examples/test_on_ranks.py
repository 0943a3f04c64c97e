"""A pytest file: the tests run on two ranks of this machine's CPU, by the plugin that tpcompile registers.

pytest examples/test_on_ranks.py
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tpcompile.pytest_plugin.fixture import TensorParallel


@pytest.mark.tp(world_size=2)
@pytest.mark.parametrize("width", [16, 32])
def test_mlp_compiles_to_one_graph(tp: TensorParallel, width: int) -> None:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
    parallelize_module(model, tp.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    tp.expect(graphs=1, breaks=0, recompiles=0)
    tp.check(model, torch.ones(4, 8), backward=True, backend="aot_eager")


@pytest.mark.tp(world_size=2)
def test_sum_over_ranks(tp: TensorParallel) -> None:
    y = tp.check(lambda x: tp.comm.all_reduce(x * 2), torch.ones(4), backend="aot_eager")
    assert y.tolist() == [4.0] * 4
