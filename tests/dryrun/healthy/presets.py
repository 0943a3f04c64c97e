"""The stack of each preset, of tpcompile.nn."""

from __future__ import annotations

import torch

from tpcompile.collectives.strategies import Collectives
from tpcompile.config import load
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.draw import draw_inputs
from tpcompile.target import Target, TargetContext


def stack(ctx: TargetContext) -> Target:
    """Settings: preset."""
    config = load(ctx.settings["preset"]).block
    collectives = Collectives(ctx.mesh.get_group("tp"))
    with ctx.device:
        model = TransformerStack(config, collectives, num_layers=config.num_layers)
    dtype = getattr(torch, config.dtype)
    inputs = draw_inputs(config, seed=1, device=ctx.device, dtype=dtype, seq_len=config.seq_len)
    return Target(program=model, inputs=inputs)
