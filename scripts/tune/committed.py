"""Programs of `tpcompile bench`: mode C with the rows that were committed for 2 H100, on whatever GPU is here.

tpcompile bench --program scripts/tune/committed.py:build:graphed
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tpcompile import by_size
from tpcompile.bench.contract import BenchContext, Program
from tpcompile.bench.programs import stack_of
from tpcompile.by_size import Sums, Table
from tpcompile.by_size.setting import gpu_of
from tpcompile.collectives.strategies import Collectives

GPU = "NVIDIA H100 80GB HBM3"


def build(ctx: BenchContext) -> Program:
    """The block that ships, compiled already."""
    committed = Table.read(by_size.__path__[0] + "/table.json").cell(GPU, ctx.world_size)
    assert committed is not None, f"no cell of {ctx.world_size} x {GPU} is committed"
    sums = Sums(Table(cells=(committed.changed(gpu=gpu_of(ctx.device)),)))
    program = stack_of(ctx, Collectives(ctx.group))
    settings = ctx.config.compile
    compiled = torch.compile(
        program.program, backend=settings.backend, dynamic=settings.dynamic, options=sums.options
    )  # fmt: skip
    return replace(program, program=compiled, is_compiled=True, notes=(sums.text(ctx.group),))
