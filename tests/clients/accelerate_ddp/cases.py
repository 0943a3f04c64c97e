"""Faults of the accelerate client."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="accelerate, DDP",
    folder="accelerate_ddp",
    needs="accelerate",
    faults=(
        Fault(
            name="main_process_metrics",
            says="a metric is gathered by the main process only",
            reports=("huggingface/accelerate#2785",),
            rank=0,
            causes=frozenset({Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
        Fault(
            name="local_early_stop",
            says="each rank stops early by the loss of its own part of the evaluation set; rank 1 does",
            reports=("IBM/ado#41",),
            rank=1,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
    ),
)
