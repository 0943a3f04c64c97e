"""A compile that differs between ranks and whose explanation raised -> a divergence with what is certain."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from tpcompile.evidence.groups.align import Slot
from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.groups.domain import Domain, sides
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Divergence, DivergenceClass, Layer, value_item
from tpcompile.evidence.records.causes import Cause

DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, StopIteration, TypeError, ValueError)
"""Exceptions of a defect in the code that names causes; an unreachable store raises a different one."""


def unexplained(domain: Domain, slot: Slot, absent: Sequence[int], error: Exception) -> Divergence:
    """The layers that differ and the groups of equal ranks, or the ranks that did not compile it."""
    layers = list(dict.fromkeys(layer for layer, _ in slot.differing))
    names = ", ".join(layers) or "compiles"
    hangs = Layer.COLLECTIVES in layers
    ranks = [*slot.compiles, *absent]
    by_rank = dict.fromkeys(ranks, "nothing")
    for rank, compile_ in slot.compiles.items():
        shas = [f"{layer} {compile_.sha(layer, part) or '?':.8}" for layer, part in slot.differing]
        by_rank[rank] = ", ".join(shas) or "it"
    hashes = ByRank(by_rank)
    row = Row(value_item("compiled", text) for _, text in hashes.sides())
    cls = DivergenceClass.COLLECTIVES if hangs else DivergenceClass.CONTENT
    raised = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(raised.filename).name
    where = f"{type(error).__name__}: {error} at {file}:{raised.lineno}"
    return Divergence(
        layer=first(layers) or Layer.GRAPH,
        cls=cls,
        domain=domain.name,
        where=slot.where,
        groups=sides(hashes.groups(), row),
        title=f"{names} of {slot.frame} not equal; naming the cause failed, a bug in tpcompile ({where})",
        cause=Cause.UNKNOWN,
        step=slot.step,
        consequences=tuple(layers[1:]),
    )
