"""Faults of the client of transformers' generate."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="transformers generate, tp_plan",
    folder="generate",
    needs="transformers",
    faults=(
        Fault(
            name="rank_seeded_sampling",
            says="ranks sample with seeds of their own, so their sequences differ and end at different tokens",
            reports=("huggingface/transformers#36634", "deepspeedai/DeepSpeed#8262"),
            rank=1,
            causes=frozenset({Cause.INPUT_VALUES, Cause.CALL_COUNT, Cause.PARTED}),
        ),
        Fault(
            name="local_disconnect",
            says="a stopping criterion knows on rank 0 only that the client has gone",
            reports=("NVIDIA/TensorRT-LLM#1767",),
            rank=0,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
    ),
)
