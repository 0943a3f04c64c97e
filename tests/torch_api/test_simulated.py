"""The private names of torch that `tpcompile.numerics` uses still mean what they meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tpcompile import collectives
from tpcompile.errors import ConfigError
from tpcompile.ranks import groups
from tpcompile.torch_api import simulated

CPU = torch.device("cpu")


@pytest.mark.parametrize("op", ["sum", "max", "min", "product"])
def test_listener_gets_the_reduce_op_the_tensor_and_the_group(op: str) -> None:
    heard: list[tuple[str, str, list[int], str]] = []
    with simulated.local_ranks(2) as group:
        x = simulated.spread({0: torch.ones(3), 1: torch.full((3,), 2.0)})
        with simulated.running(2), listening(heard):
            y = collectives.all_reduce(x, group=group, op=op)
        assert heard == [("all_reduce", op, [3], group.group_name)]
    expected = {"sum": 3.0, "max": 2.0, "min": 1.0, "product": 2.0}[op]
    assert [simulated.of_rank(y, rank).tolist() for rank in (0, 1)] == [[expected] * 3] * 2


def test_listener_gets_gathers_scatters_and_the_backward_pass() -> None:
    heard: list[tuple[str, str, list[int], str]] = []
    with simulated.local_ranks(4) as group:
        x = simulated.spread({rank: torch.ones(2, 3) for rank in range(4)}).requires_grad_()
        with simulated.running(4), listening(heard):
            full = collectives.all_gather_single(x, dim=0, group=group, dst="R")
            collectives.reduce_scatter_single(full, dim=0, group=group).sum().backward()
    names = [(op, reduce_op, shape) for op, reduce_op, shape, _ in heard]
    gather, scatter = ("all_gather_into_tensor", "", [2, 3]), ("reduce_scatter_tensor", "sum", [8, 3])
    assert names == [gather, scatter, gather, scatter]


def test_listener_gets_functional_collectives_and_passes_eager_code_on_unchanged() -> None:
    heard: list[tuple[str, str, list[int], str]] = []
    seen: list[str] = []

    class Below(TorchDispatchMode):
        sees_in_place_ops = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with Below(), listening(heard):
            collectives.all_reduce(torch.ones(3), group=dist.group.WORLD)
            funcol.all_reduce(torch.ones(4), "max", dist.group.WORLD).wait()
            with FlopCounterMode(display=False):
                collectives.all_gather_single(torch.ones(5), dim=0, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert [row[:3] for row in heard] == [
        ("all_reduce", "sum", [3]), ("all_reduce", "max", [4]), ("all_gather_into_tensor", "", [5]),
    ]  # fmt: skip
    assert next(name for name in seen if "c10d" in name) == "c10d"


def test_each_local_rank_reads_its_own_number() -> None:
    index = {rank: torch.tensor([rank]) for rank in range(3)}
    with simulated.local_ranks(3) as group:
        with simulated.running(3), groups.first_index(simulated.spread(index)):
            rank = collectives.rank_index(group, CPU) + 0
        assert [simulated.of_rank(rank, r).tolist() for r in range(3)] == [[0], [1], [2]]
    assert not dist.is_initialized()


def test_a_process_with_a_default_group_is_refused() -> None:
    with (
        simulated.local_ranks(2),
        pytest.raises(ConfigError, match="default group"),
        simulated.local_ranks(2),
    ):
        pass


def listening(heard: list[tuple[str, str, list[int], str]]) -> simulated.CollectiveListener:
    """A listener that keeps what it hears."""

    def keep(op: str, reduce_op: str, sent: Tensor, group: str) -> None:
        heard.append((op, reduce_op, list(sent.shape), group))

    return simulated.CollectiveListener(keep)
