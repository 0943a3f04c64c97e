"""Facts of all ranks -> the check of compiled code that is wrong while eager is right; torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.choices import AnyMode
from tpcompile.evidence.groups.by_rank import ByRank
from tpcompile.evidence.records import Check, CheckId, CompilerLayer, Status, first_layer
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.gate.measurements import GateFacts

_EXPLAINED = (CheckId.FORWARD, CheckId.GRADIENTS, CheckId.EAGER)
"""Checks of numbers, which are red because of it."""


def with_compiler(mode: AnyMode, facts: ByRank[GateFacts], checks: Sequence[Check]) -> list[Check]:
    """The checks of numbers, behind the one of the compiler where the search found something."""
    found = {rank: known.wrong_compiled for rank, known in facts.items() if known.wrong_compiled}
    shown = first_layer(found)
    if shown is None:
        return list(checks)
    is_random = shown.layer is CompilerLayer.RANDOM
    ranks = tuple(sorted(found))
    check = Check(
        id=CheckId.COMPILER,
        mode=mode,
        status=Status.INFO if is_random else Status.FAIL,
        expected="compiled code computes what eager does, which is right",
        observed=shown.brief,
        details=(f"wrong on {named_ranks(ranks)}", *shown.details),
        line=shown.line,
        ranks=() if is_random else ranks,
    )
    update: dict[str, object] = {"status": Status.INFO} if is_random else {"is_consequence": True}
    return [check, *(_explained(one, update) for one in checks)]


def _explained(check: Check, update: dict[str, object]) -> Check:
    is_explained = check.is_red and check.id in _EXPLAINED
    return check.model_copy(update=update) if is_explained else check
