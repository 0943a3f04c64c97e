"""A target whose module reads the rank when it is imported."""

from __future__ import annotations

import os

import torch

import tpcompile
from tpcompile.target import TargetContext

RANK = os.environ.get("RANK", "unset")


def build(ctx: TargetContext) -> tpcompile.Target:
    """Raises where this module was imported as a different rank."""
    assert str(ctx.rank) == RANK, (ctx.rank, RANK)
    return tpcompile.Target(program=lambda x: x + 1, inputs=(torch.randn(4),))
