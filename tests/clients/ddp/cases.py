"""Faults of the DDP client."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="DDP, DDPOptimizer",
    folder="ddp",
    needs="torch",
    num_ranks=4,
    faults=(
        Fault(
            name="uneven_shards",
            says="the file of rank 1 is two batches shorter, so its loop ends early",
            reports=("pytorch/pytorch#85775", "meta-pytorch/torchrec#4158"),
            rank=1,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
        Fault(
            name="invalid_batch",
            says="rank 1 skips the backward of a batch whose loss is not finite there",
            reports=("NVIDIA-NeMo/Automodel#2468", "Lightning-AI/pytorch-lightning#5359"),
            rank=1,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
    ),
)
