"""What a program is given -> our stack: eager, modes A, B and C, with fast paths, and without communication."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tpcompile.bench.programs import Built, Setup
from tpcompile.collectives.api import Dst
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives, TpComm
from tpcompile.errors import ConfigError
from tpcompile.fastpath import Selection, tp_region
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.fast_paths import check_exchanges, use_fast_paths
from tpcompile.nn.state import load_full_state_dict, local_slices_of


class IdentityCollectives(Collectives):
    """What mode C computes, without what it sends: tensors of the right shapes, wrong numbers."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """`x` itself."""
        return x

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """`x` itself, forward and backward."""
        return x

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """This rank's part, as often as there are ranks."""
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The first part."""
        return x.chunk(self.size, dim)[0]


def stack_of(setup: Setup, comm: TpComm) -> Built:
    """This rank's stack, with its slices of the weights."""
    block = setup.settings.block
    with torch.device("meta"):
        stack = TransformerStack(block, comm, num_layers=block.num_layers)
    stack = stack.to_empty(device=setup.device)
    load_full_state_dict(stack, setup.given.weights)
    return Built(
        stack,
        setup.given.inputs,
        slice_of=lambda name, full: local_slices_of({name: full}, module=stack)[name],
        around=partial(tp_region, setup.group.size()),
    )


def _mode(comm: Any, setup: Setup) -> Built:
    return stack_of(setup, comm(setup.group))


def _with_fast_paths(setup: Setup, *, ask_table: bool) -> Built:
    """Raises ConfigError where no place of the block has one that can run."""
    built = stack_of(setup, Collectives(setup.group))
    stack, settings = built.module, setup.settings
    selection = Selection(setup.group, ask_table=ask_table, timeout_s=settings.gate.store_timeout_s)
    block = settings.block
    decisions = use_fast_paths(
        stack,
        selection,
        batch=block.batch,
        seq_len=block.seq_len,
        train=settings.train,
        wait_s=settings.gate.store_timeout_s,  # ranks compile for themselves, and are apart by as much
    )
    used = [path for path, decision in decisions.items() if decision.is_used]
    if not used:
        reasons = "; ".join(f"{path}: {decision.why}" for path, decision in decisions.items())
        raise ConfigError(f"no fast path is used here: {reasons or 'the block has no place for one'}")
    built.check = partial(check_exchanges, stack)
    built.notes = (f"fast paths: {', '.join(used)}",)
    return built


BUILDERS = {
    "eager": partial(_mode, Collectives),
    "A": partial(_mode, DisabledCollectives),
    "B": partial(_mode, InPlaceCollectives),
    "C": partial(_mode, Collectives),
    "C+fast": partial(_with_fast_paths, ask_table=True),
    "C+fast-all": partial(_with_fast_paths, ask_table=False),
    "compute": partial(_mode, IdentityCollectives),
}
