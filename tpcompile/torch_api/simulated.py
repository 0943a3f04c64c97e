"""Every private or moving name of torch that `tpcompile.testing` needs; seen on torch 2.11.0 and 2.13.0.

    name                                        why
    torch.utils._python_dispatch                sees collectives of eager code, forward and backward, by whomever
    torch.ops.c10d.*, ProcessGroup.unbox        what such an op communicates, and over which group
    torch.distributed._local_tensor             all ranks in one process: a tensor that holds one tensor per rank
    torch.testing._internal...fake_pg           a group of N ranks for it that communicates with nobody
    tpcompile.ranks.groups._RANK_INDEX           the rank as tensor data, which must hold all ranks there

`tests/torch_api/test_simulated.py` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpcompile.ranks import groups
from tpcompile.errors import ConfigError

_REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")
# c10d op -> its name in a compiled graph, and the argument that is sent.
_SENT = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather_into_tensor", 1),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1),
    "alltoall_base_": ("all_to_all_single", 1),
    "broadcast_": ("broadcast", 0),
}
OnCollective = Callable[[str, str, Tensor, str], None]


class CollectiveListener(TorchDispatchMode):
    """Calls `heard(op, reduce op, tensor that is sent, group name)` for every collective of eager code while active."""

    sees_in_place_ops = True  # what is heard is then what eager code does without a listener

    def __init__(self, heard: OnCollective) -> None:
        super().__init__()
        self._heard = heard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _, _, name = func._schema.name.partition("::")
        if func.namespace == "c10d":
            self._hear(name, args)
        elif func.namespace == "_c10d_functional":
            self._hear_functional(name, func._schema, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _hear(self, name: str, args: Any) -> None:
        op, place = _SENT.get(name, (name, 0))
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        if not boxed:
            return
        sent = args[place]
        tensor = sent if isinstance(sent, Tensor) else sent[0]
        group = dist.ProcessGroup.unbox(boxed[0]).group_name
        self._heard(op, _reduce_op(boxed[1:]), tensor, group)

    def _hear_functional(self, name: str, schema: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if "group_name" not in given:  # a wait
            return
        sent = args[0]
        tensor = sent if isinstance(sent, Tensor) else sent[0]
        self._heard(name, given.get("reduce_op", ""), tensor, given["group_name"])


def _reduce_op(boxed: list[Any]) -> str:
    for candidate in boxed:
        if candidate._type().qualified_name().endswith("ReduceOp"):
            found = candidate.op()
            return next((n for n in _REDUCE_OPS if found == getattr(dist.ReduceOp, n.upper())), "")
    return ""


@contextmanager
def local_ranks(size: int, device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A group of `size` ranks that all live in this process and this thread; eager only.

    Under `running` an op on a tensor made by `spread` runs once per rank, and a collective combines the ranks' tensors.
    Raises ConfigError when the process has a default group already.
    """
    if dist.is_initialized():
        raise ConfigError("this process has a default group; all ranks in one process need a process without one")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    saved = dict(groups._RANK_INDEX)
    try:
        groups._RANK_INDEX[0, device] = spread({r: torch.tensor([r], device=device) for r in range(size)})
        world = dist.group.WORLD
        assert world is not None, "init_process_group left no default group"
        yield world
    finally:
        groups._RANK_INDEX.clear()
        groups._RANK_INDEX.update(saved)
        dist.destroy_process_group()


def running(size: int) -> Any:
    """Context in which code runs on all ranks of `local_ranks`."""
    from torch.distributed._local_tensor import LocalTensorMode

    class Ranks(LocalTensorMode):
        sees_in_place_ops = True  # it combines the tensors of all ranks there, and has few of the functional ops

    return Ranks(size)


def spread(by_rank: Mapping[int, Tensor]) -> Tensor:
    """One tensor that holds another one per rank."""
    from torch.distributed._local_tensor import LocalTensor

    return LocalTensor({rank: tensor.detach().clone() for rank, tensor in by_rank.items()})


def of_rank(tensor: Any, rank: int) -> Tensor:
    """What that rank holds; a tensor that was not spread is the same on all."""
    return tensor._local_tensors[rank] if hasattr(tensor, "_local_tensors") else tensor
