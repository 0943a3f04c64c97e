"""Ranks that are set up, fed or loaded differently, under equal programs: the preflight checks compare them."""

from __future__ import annotations

import os

import torch
from torch import nn

from tests.faults.case import fault
from tests.faults.context import Context
from tpcompile.evidence.records import Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.preflight import Handshake, InputCheck, check_setup

# B batch, D features.

_KERNELS = "flashinfer#3186, sglang#23317: TP ranks choose different kernels for the same operator"
_DRIFT = "pytorch#187445, pytorch#187446: numbers drift between ranks without an error"

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


@fault(Cause.ENVIRONMENT, _KERNELS, world_size=3)
def auto_backend(context: Context) -> None:
    """`auto` resolves to a different attention backend on rank 1."""
    if context.diverges:
        context.reached_fault()
    found = "flash_attn" if not context.diverges else "sdpa"
    report(context, check_setup(resolved={"attention": found}, timeout_s=_WAIT_S))


@fault(
    Cause.ENVIRONMENT,
    "pytorch#163369: ranks may choose different algorithms",
    "pytorch#160527: a bucket size set on one rank",
    world_size=3,
    env={1: {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}},
)
def compile_variable(context: Context) -> None:
    """TORCHINDUCTOR_MAX_AUTOTUNE is set on rank 1 only."""
    if context.diverges:
        context.reached_fault()
        assert "TORCHINDUCTOR_MAX_AUTOTUNE" in os.environ, "the case sets it on this rank"
    report(context, check_setup(timeout_s=_WAIT_S))


@fault(Cause.DTYPE, _DRIFT, world_size=3)
def dtype_policy(context: Context) -> None:
    """Rank 1 loads its norm in bfloat16."""
    block = Block(context)
    if context.diverges:
        context.reached_fault()
        block.norm.data = block.norm.data.bfloat16()
    report(context, check_setup(block, sharded=["up"], timeout_s=_WAIT_S))


@fault(Cause.WEIGHTS, _DRIFT, world_size=3)
def flipped_bit(context: Context) -> None:
    """One bit of a replicated norm weight is different on rank 1."""
    block = Block(context)
    if context.diverges:
        context.reached_fault()
        block.norm.data.view(torch.int32)[7] ^= 1
    report(context, check_setup(block, sharded=["up"], timeout_s=_WAIT_S))


@fault(Cause.WEIGHTS, _DRIFT, step=2, world_size=3)
def mutated_shard(context: Context) -> None:
    """A weight shard of rank 1 is written to at step 2, after loading."""
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


@fault(Cause.INPUT_VALUES, _DRIFT, ranks=(0,), step=2, world_size=3)
def perturbed_input(context: Context) -> None:
    """One number of the batch of rank 0 is different at step 2."""
    inputs = InputCheck(timeout_s=_WAIT_S)
    compiled = torch.compile(lambda x_BD: x_BD.sin() + 1, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        x_BD = context.randn(8, 16)
        if context.faulty(step):
            x_BD[5, 3] += 1e-6
        if report(context, inputs.check(x_BD, step=step)):
            return
        compiled(x_BD)


@fault(Cause.AGREED_VALUES, _DRIFT, marker="# fault: tokens", step=2, world_size=3)
def sampled_tokens(context: Context) -> None:
    """Rank 1 draws from its generator once more at step 2, so that its tokens are other ones from then on."""
    generator = torch.Generator().manual_seed(0)
    for step in range(context.num_steps):
        if context.faulty(step):
            torch.rand(1, generator=generator)
        tokens = torch.randint(50_000, (8,), generator=generator).to(context.device)
        if context.sentinel is not None:
            context.sentinel.agree("tokens", tokens, step=step)  # fault: tokens
