"""Ranks that are set up, fed or loaded differently, under equal programs: the parity handshake is asked."""

from __future__ import annotations

import os

import torch
from torch import nn

from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.faults.context import Context
from tpcompile.preflight import Handshake, InputParity, check_parity

# B batch, D features.

_WAIT_S = 30.0


class Block(nn.Module):
    """A column shard of this rank, and a norm that all ranks hold alike."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.up = nn.Parameter(context.randn(32, 16) + context.rank)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 16, device=context.device))


def report(context: Context, verdict: Verdict) -> bool:
    """Write a red verdict where the sentinel's would be; True when it is red."""
    if verdict.status != Status.FAIL:
        return False
    RunDir.create(context.run_dir / "run").write_verdict(verdict)
    return True


def auto_backend(context: Context) -> None:
    """`attention="auto"` finds a library on all ranks but one."""
    if context.diverges:
        context.reached_fault()
    found = "flash_attn" if not context.diverges else "sdpa"
    report(context, check_parity(resolved={"attention": found}, timeout_s=_WAIT_S))


def variable(context: Context) -> None:
    """A variable that changes what Inductor makes of the same graph is set on one rank only."""
    if context.diverges:
        context.reached_fault()
        assert "TORCHINDUCTOR_MAX_AUTOTUNE" in os.environ, "the case sets it on this rank"
    report(context, check_parity(timeout_s=_WAIT_S))


def dtype_policy(context: Context) -> None:
    """One rank loads its norm in bfloat16."""
    block = Block(context)
    if context.diverges:
        context.reached_fault()
        block.norm.data = block.norm.data.bfloat16()
    report(context, check_parity(block, sharded=["up"], timeout_s=_WAIT_S))


def flipped_bit(context: Context) -> None:
    """One bit of a replicated norm weight is another on one rank."""
    block = Block(context)
    if context.diverges:
        context.reached_fault()
        block.norm.data.view(torch.int32)[7] ^= 1
    report(context, check_parity(block, sharded=["up"], timeout_s=_WAIT_S))


def mutated_shard(context: Context) -> None:
    """Inference: something writes to a weight shard of one rank between two requests."""
    block = Block(context)
    compiled = torch.compile(lambda x_BD: x_BD @ block.up.T * block.norm.sum(), backend=context.backend, dynamic=False)
    handshake = Handshake(block, sharded=["up"], frozen=True, timeout_s=_WAIT_S)
    assert handshake.check().status == Status.PASS, "the ranks begin alike"
    for step in range(context.num_steps):
        compiled(context.randn(8, 16))
        if context.faulty(step):
            block.up.data[3, 5] += 1
        if report(context, handshake.recheck(step=step)):
            return


def perturbed_input(context: Context) -> None:
    """The batch of one rank is another in its last bits at a later step."""
    parity = InputParity(timeout_s=_WAIT_S)
    compiled = torch.compile(lambda x_BD: x_BD.sin() + 1, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        x_BD = context.randn(8, 16)
        if context.faulty(step):
            x_BD[5, 3] += 1e-6
        if report(context, parity.check(x_BD, step=step)):
            return
        compiled(x_BD)
