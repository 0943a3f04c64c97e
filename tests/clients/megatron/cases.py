"""Faults of the megatron-core client."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="megatron-core GPT",
    folder="megatron",
    needs="megatron-core",
    faults=(
        Fault(
            name="local_microbatches",
            says="the loader of rank 1 packs one micro-batch less in a step",
            reports=("verl-project/verl#6176", "hiyouga/EasyR1#11004"),
            rank=1,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
        Fault(
            name="first_rank_metric",
            says="the first rank of the group averages the loss that it prints, the other does not",
            reports=("huggingface/accelerate#2785",),
            rank=0,
            causes=frozenset({Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
    ),
)
