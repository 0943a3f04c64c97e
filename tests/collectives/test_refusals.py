"""Mistakes are refused before any rank communicates, on the rank that makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tpcompile.collectives import api as tp
from tpcompile.collectives import asynchronous as later
from tpcompile.errors import ConfigError

TEXTS = {
    "not a tensor": "is a list; pass one tensor",
    "sparse": "pass a dense tensor",
    "bool sum": "torch.bool is not supported",
    "average of integers": "torch.int64 is not supported",
    "complex maximum": "torch.complex64 is not supported",
    "int16": "torch.int16 is not supported",
    "device": "on meta, and group",
    "outside": "this rank is not in the group",
    "unknown name": "no group is named 'nobody' on this rank",
    "mesh of two dims": "the mesh has 2 dims",
    "no such mesh dim": "the mesh has no dim 'pp'",
    "mesh dim out of range": "dim 2 is out of range",
    "tuple": "(DeviceMesh, name or index",
    "number as group": "group is a float",
    "dst": "dst='P' is unknown",
    "src type": "src='V' is unknown",
    "op": "op='mean' is unknown",
    "product under grad": "op='product' has no gradient",
    "started maximum under grad": "op='max' has no gradient",
    "dim": "dim=2 is out of range for a tensor with 2 dims",
    "0-d gather": "dim=0 is out of range for a tensor with 0 dims",
    "indivisible reduce_scatter": "size 3 of dim 0 is not divisible by the group size 2; pad it to 4",
    "indivisible scatter": "size 3 of dim 0 is not divisible",
    "indivisible all_to_all": "size 3 of dim 0 is not divisible",
    "own size": "has 4 for rank 0 of the group",
    "too many sizes": "has 3 entries for a group of 2 ranks",
    "negative size": "none negative",
    "sizes that do not add up": "add up to 4, but the dim has size 3",
    "splits that do not add up": "input_splits=[1, 1] add up to 2",
    "one kind of splits": "pass input_splits and output_splits, or neither",
    "src": "src=2 is not a rank of a group of 2",
    "waited twice": "wait() was called twice",
}


def _mistakes(outside: Any, mesh: Any) -> dict[str, Callable[[], Any]]:
    g, x = dist.group.WORLD, torch.ones(3, 4)
    grown = x.clone().requires_grad_()
    any_: Any = tp
    return {
        "not a tensor": lambda: any_.all_reduce([1.0], group=g),
        "sparse": lambda: tp.all_reduce(x.to_sparse(), group=g),
        "bool sum": lambda: tp.all_reduce(x.bool(), group=g),
        "average of integers": lambda: tp.all_reduce(x.long(), group=g, op="avg"),
        "complex maximum": lambda: tp.all_reduce(x.to(torch.complex64), group=g, op="max"),
        "int16": lambda: tp.all_gather_single(x.short(), dim=0, group=g),
        "device": lambda: tp.broadcast(x.to("meta"), src=0, group=g),
        "outside": lambda: tp.all_reduce(x, group=outside),
        "unknown name": lambda: tp.all_reduce(x, group="nobody"),
        "mesh of two dims": lambda: tp.all_reduce(x, group=mesh),
        "no such mesh dim": lambda: tp.all_reduce(x, group=(mesh, "pp")),
        "mesh dim out of range": lambda: tp.all_reduce(x, group=(mesh, 2)),
        "tuple": lambda: any_.all_reduce(x, group=(mesh,)),
        "number as group": lambda: any_.all_reduce(x, group=1.5),
        "dst": lambda: any_.all_reduce(x, group=g, dst="P"),
        "src type": lambda: any_.scatter_single(x, dim=1, group=g, src="V"),
        "op": lambda: tp.all_reduce(x, group=g, op="mean"),
        "product under grad": lambda: tp.all_reduce(grown, group=g, op="product"),
        "started maximum under grad": lambda: later.all_reduce_start(grown, group=g, op="max"),
        "dim": lambda: tp.all_gather_single(x, dim=2, group=g),
        "0-d gather": lambda: later.all_gather_start(x.sum(), dim=0, group=g),
        "indivisible reduce_scatter": lambda: tp.reduce_scatter_single(x, dim=0, group=g),
        "indivisible scatter": lambda: tp.scatter_single(x, dim=0, group=g),
        "indivisible all_to_all": lambda: tp.all_to_all_single(x, group=g),
        "own size": lambda: tp.all_gather_single(x, dim=0, group=g, sizes=[4, 3]),
        "too many sizes": lambda: tp.all_gather_single(x, dim=0, group=g, sizes=[3, 3, 3]),
        "negative size": lambda: tp.reduce_scatter_single(x, dim=0, group=g, sizes=[4, -1]),
        "sizes that do not add up": lambda: tp.reduce_scatter_single(x, dim=0, group=g, sizes=[2, 2]),
        "splits that do not add up": lambda: tp.all_to_all_single(
            x, group=g, input_splits=[1, 1], output_splits=[1, 1]
        ),
        "one kind of splits": lambda: later.all_to_all_start(x, group=g, input_splits=[1, 2]),
        "src": lambda: tp.broadcast(x, src=2, group=g),
        "waited twice": lambda: _twice(later.all_reduce_start(x, group=None)),
    }


def _twice(pending: later.Pending) -> None:
    pending.wait()
    pending.wait()


@pytest.fixture
def mistakes() -> dict[str, Callable[[], Any]]:
    return _mistakes(dist.new_group([1]), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))


@pytest.mark.tp(world_size=2)
def test_mistakes_are_refused_with_what_is_wrong_before_any_rank_communicates(
    mistakes: dict[str, Callable[[], Any]],
) -> None:
    """Only rank 0 makes the mistakes: if one of them communicated, it would meet rank 1's sum below, or hang."""
    assert mistakes.keys() == TEXTS.keys()
    said = {}
    for name, mistake in mistakes.items() if dist.get_rank() == 0 else ():
        with pytest.raises(ConfigError) as refused:
            mistake()
        said[name] = str(refused.value)
    assert {name: text for name, text in said.items() if TEXTS[name] not in text} == {}
    assert tp.all_reduce(torch.ones(1), group=dist.group.WORLD).item() == 2.0
