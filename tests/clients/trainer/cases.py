"""Faults of the client of transformers' Trainer."""

from __future__ import annotations

from tests.clients.case import Client, Fault
from tpcompile.evidence.records.causes import Cause

CLIENT = Client(
    name="transformers Trainer, tp_plan",
    folder="trainer",
    needs="transformers",
    faults=(
        Fault(
            name="local_notice",
            says="a callback sets should_training_stop on the rank whose machine gets a notice",
            reports=("IBM/ado#41", "Red-Hat-AI-Innovation-Team/training_hub#145"),
            rank=1,
            causes=frozenset({Cause.CALL_COUNT, Cause.EXTRA_COLLECTIVE, Cause.PARTED}),
        ),
        Fault(
            name="rank_seeded_crop",
            says="a collator that crops at random is seeded by the rank: tensor-parallel ranks get different lengths",
            reports=("InternLM/InternLM#405",),
            rank=1,
            causes=frozenset({Cause.SHAPE, Cause.COLLECTIVE_SIZES}),
        ),
    ),
)
