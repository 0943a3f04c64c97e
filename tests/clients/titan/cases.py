"""Faults of the torchtitan client."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="torchtitan debug model",
    folder="titan",
    needs="torchtitan",
    faults=(
        Fault(
            name="local_invalid_loss",
            says="the rank whose loss is not finite raises",
            reports=("pytorch/torchtitan#3863",),
            rank=1,
            causes=frozenset({Cause.RAISED}),
        ),
        Fault(
            name="rank_zero_hook",
            says="a forward hook that logs is registered on rank 0 only, in blocks that are compiled with fullgraph",
            reports=("tenstorrent/tt-torch#852",),
            rank=0,
            causes=frozenset({Cause.GRAPH_BREAK, Cause.COMPILE_FAILED, Cause.RANK_BRANCH}),
        ),
    ),
)
