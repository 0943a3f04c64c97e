"""Faults of the Lightning client."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="Lightning ModelParallelStrategy",
    folder="lightning_tp",
    needs="lightning",
    faults=(
        Fault(
            name="rank_zero_log",
            says="self.log(..., sync_dist=True) on the global zero rank only",
            reports=("Lightning-AI/pytorch-lightning#19056", "dvl-tum/center-group#2"),
            rank=0,
            causes=frozenset({Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
        Fault(
            name="rank_zero_full_tensor",
            says="a callback gathers a weight with full_tensor() on rank 0 only",
            reports=("areal-project/AReaL#187",),
            rank=0,
            causes=frozenset({Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
    ),
)
