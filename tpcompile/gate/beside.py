"""Digests and divergences -> what ranks compile beside the program, such as an evaluation on rank 0; torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.judgement.checks import Ranks
from tpcompile.evidence.records import CompileDigest, Divergence, RankDigest
from tpcompile.evidence.text.ranks import named_ranks


def first_compiles(ranks: Ranks, phase: str, divergences: Sequence[Divergence]) -> ByRank[list[CompileDigest]]:
    """First compiles in a phase of frames that only some ranks compile, where that is accepted: no recompiles."""
    accepted = sorted({found.frame for found in divergences if found.frame and not found.is_red})

    def of_rank(digest: RankDigest) -> list[CompileDigest]:
        by_frame = grouped(digest.compiles, lambda compile_: compile_.frame)
        firsts = [by_frame[frame][0] for frame in accepted if frame in by_frame]
        return [compile_ for compile_ in firsts if compile_.phase == phase]

    return ranks.map(of_rank)


def text(compiles: ByRank[list[CompileDigest]]) -> str:
    """`; rank 0 compiled metric eval.py:3 for the first time`; empty for none."""
    frames = compiles.map(lambda found: ", ".join(compile_.frame for compile_ in found)).where(bool)
    return "".join(f"; {named_ranks([rank])} compiled {names} for the first time" for rank, names in frames.items())
