"""Test module -> the results of its programs on N gloo ranks, all in one start.

A test module has `ON_RANKS = {world size: (program, ...)}`. A program takes the collectives of the whole world, runs a
mistake and ours on it, and returns what both gave; the tests judge.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.collectives.strategies import Collectives
from tpcompile.testing import run_on_ranks

Found = dict[str, list[Any]]
"""Name of a program -> its result on each rank."""


def run_programs(module: str, world_size: int) -> Found:
    """Run every program of the module for this world size."""
    ranks = run_on_ranks(_worker, module, world_size, world_size=world_size, timeout_s=240)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def _worker(module: str, world_size: int) -> dict[str, Any]:
    comm, found = Collectives(dist.group.WORLD), {}
    for program in importlib.import_module(module).ON_RANKS.get(world_size, ()):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found[program.__name__] = program(comm)
    return found
