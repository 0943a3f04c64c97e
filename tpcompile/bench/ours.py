"""The context of a program -> the block that ships: eager, modes A, B and C, with fast paths, without communication."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tpcompile.bench.contract import BenchContext, Program
from tpcompile.collectives.api import Dst
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives, TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath import Selection, tp_region
from tpcompile.gate import reference
from tpcompile.nn.fast_paths import check_exchanges, use_fast_paths
from tpcompile.nn.state import local_slices_of


class IdentityCollectives(Collectives):
    """What mode C computes, without what it sends: tensors of the right shapes, wrong numbers."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """`x` itself."""
        return x

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """`x` itself, forward and backward."""
        return x

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """This rank's part, once for each rank."""
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The first part."""
        return x.chunk(self.size, dim)[0]


STRATEGIES = {
    "eager": Collectives, "A": DisabledCollectives, "B": InPlaceCollectives, "C": Collectives,
    "C+fast": Collectives, "C+fast-all": Collectives, "compute": IdentityCollectives,
}  # fmt: skip
"""Base of a name -> its collectives."""


def build(base: str, context: BenchContext) -> Program:
    """Raises ConfigError where no place of the block has a fast path that can run."""
    program = stack_of(context, STRATEGIES[base](context.group))
    return _with_fast_paths(program, context, ask_table=base == "C+fast") if "+fast" in base else program


def stack_of(context: BenchContext, comm: TpComm) -> Program:
    """This rank's stack, with its slices of the weights."""
    stack = reference.build(context.config.block, comm, context.weights, context.device)
    return Program(
        program=stack,
        inputs=context.inputs,
        slice_of=lambda name, full: local_slices_of({name: full}, module=stack)[name],
        around=partial(tp_region, context.world_size),
    )


def _with_fast_paths(program: Program, context: BenchContext, *, ask_table: bool) -> Program:
    stack, config = program.program, context.config
    limit_s = config.gate.store_timeout_s
    decisions = use_fast_paths(
        stack,
        Selection(context.group, ask_table=ask_table, timeout_s=limit_s),
        batch=config.block.batch,
        seq_len=config.block.seq_len,
        train=config.train,
        wait_s=limit_s,  # each rank compiles by itself, so that one can be this late
    )
    used = [path for path, decision in decisions.items() if decision.is_used]
    if not used:
        reasons = "; ".join(f"{path}: {decision.why}" for path, decision in decisions.items())
        raise ConfigError(f"no fast path is used here: {reasons or 'the block has no place for one'}")
    return replace(program, check=partial(check_exchanges, stack), notes=(f"fast paths: {', '.join(used)}",))
