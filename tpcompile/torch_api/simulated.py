"""Every private or moving name of torch that `tpcompile.numerics` needs; seen on torch 2.11.0 and 2.13.0.

    name                                        why
    TorchDispatchMode, in dispatch.py           sees collectives of eager code, forward and backward, from any API
    torch.ops.c10d.*, ProcessGroup.unbox        what such an op communicates, and over which group
    torch.distributed._local_tensor             all ranks in one process: a tensor that holds one tensor per rank

`tests/torch_api/test_simulated.py` fails when one of them moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.torch_api.dispatch import FakeStore, TorchDispatchMode, reduce_op_name

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
    """While active, calls `on_collective(op, reduce op, sent tensor, group name)` for each collective of eager code."""

    sees_in_place_ops = True  # it then issues the ops that eager code issues without a listener

    def __init__(self, on_collective: OnCollective) -> None:
        super().__init__()
        self._on_collective = on_collective

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        _, _, name = func._schema.name.partition("::")
        if func.namespace == "c10d":
            self._notify_of_in_place(name, args)
        elif func.namespace == "_c10d_functional":
            self._notify_of_functional(name, func._schema, args, kwargs)
        return func(*args, **kwargs)

    def _notify_of_in_place(self, name: str, args: Any) -> None:
        op, place = _SENT.get(name, (name, 0))
        boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        if not boxed:
            return
        group = dist.ProcessGroup.unbox(boxed[0]).group_name
        reductions = (each for each in boxed[1:] if each._type().qualified_name().endswith("ReduceOp"))
        reduction = next(map(reduce_op_name, reductions), "")
        self._on_collective(op, reduction, _first_tensor(args[place]), group)

    def _notify_of_functional(self, name: str, schema: Any, args: Any, kwargs: Any) -> None:
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        if "group_name" not in given:  # a wait
            return
        self._on_collective(name, given.get("reduce_op", ""), _first_tensor(args[0]), given["group_name"])


def _first_tensor(sent: Any) -> Tensor:
    """The argument that is sent, or the first of a list."""
    return sent if isinstance(sent, Tensor) else sent[0]


@contextmanager
def local_ranks(size: int) -> Iterator[dist.ProcessGroup]:
    """A group of `size` ranks that all live in this process and this thread; eager only.

    Under `running` an op on a tensor made by `spread` runs once per rank, and a collective combines the ranks' tensors.
    Raises ConfigError when the process has a default group already.
    """
    if dist.is_initialized():
        raise ConfigError("this process has a default group; all ranks in one process need a process without one")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        world = dist.group.WORLD
        assert world is not None, "init_process_group left no default group"
        yield world
    finally:
        dist.destroy_process_group()


def running(size: int) -> Any:
    """Context in which code runs on all ranks of `local_ranks`."""
    from torch.distributed._local_tensor import LocalTensorMode

    class Ranks(LocalTensorMode):
        sees_in_place_ops = True  # it combines the tensors of all ranks there, and has few of the functional ops

    return Ranks(size)


def spread(by_rank: Mapping[int, Tensor]) -> Tensor:
    """One tensor that holds the tensor of every rank."""
    from torch.distributed._local_tensor import LocalTensor

    return LocalTensor({rank: tensor.detach().clone() for rank, tensor in by_rank.items()})


def of_rank(tensor: Any, rank: int) -> Tensor:
    """The tensor of `rank`; a tensor that was not spread is the same on all ranks."""
    return tensor._local_tensors[rank] if hasattr(tensor, "_local_tensors") else tensor
