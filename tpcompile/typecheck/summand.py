"""A replicated tensor in a sum over the ranks -> right, counted several times, or with a part of its gradient.

The sum has it as often as the ranks' multiples of it make together. The gradient of a summand is the same on all ranks.
Of I each rank keeps what it gets, so it has to be the whole gradient; of R copy_to_tp adds up what the ranks get.
"""

from __future__ import annotations

import math

from tpcompile.typecheck.report import OnSomeRanks
from tpcompile.typecheck.scale import Base, Factor, is_close
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType
from tpcompile.typecheck.step import Step


def wrong_summand(step: Step, whole: SpmdType, *, added: str, fix: str) -> SpmdType | None:
    """Report a value or a gradient that is wrong in a sum over the ranks; None when there is none.

    `added` says what the op does with the tensor, `fix` what to do where it is counted several times. The result is
    of unknown type where its numbers do not tell.
    """
    terms = whole.multiples.terms
    for base, factor in terms.items():
        if not is_summand(factor, step.world) and not _may_be_summand(factor, step.world):
            return _counted_several_times(step, whole, base, factor, added=added, fix=fix)
    for base, factor in terms.items():
        wanted = factor.value * (step.world if whole.kind == "I" else 1)
        is_judged = step.has_gradient(whole) and not math.isnan(factor.gradient)
        is_in_both = not is_close(factor.gradient, 0) and not is_close(wanted, 0)
        if is_judged and is_in_both and not is_close(factor.gradient, wanted):
            return _part_of_gradient(step, whole, base, factor, wanted, added=added)
    is_certain = all(is_summand(factor, step.world) for factor in terms.values())
    is_hooked = any(math.isnan(factor.gradient) for factor in terms.values())
    return None if terms and is_certain and not is_hooked else UNKNOWN


def is_summand(factor: Factor, world: int) -> bool:
    """Whether the multiple is one rank's share of a tensor: nothing, 1 / size, or a number over it."""
    is_once = is_close(abs(factor.value) * world, 1)
    is_share = factor.is_shared and abs(factor.value) < 1
    return is_once or is_share or is_close(factor.value, 0)


def _may_be_summand(factor: Factor, world: int) -> bool:
    """Whether a number of the user's may be beside the number of ranks, as in `b / (2 * size)`; or `2 * b / size`,
    where size is 2.
    """
    times = 1 / abs(factor.value) / world
    return factor.is_shared or (times > 1 and is_close(times, round(times)))


def _counted_several_times(
    step: Step, whole: SpmdType, base: Base, factor: Factor, *, added: str, fix: str
) -> SpmdType:
    multiple = "" if is_close(factor.value, 1) else f", times {factor.value:g},"
    count = f"{step.world} times" if not multiple else f"{step.world} times: {factor.value * step.world:g} of it"
    return step.flag(
        "bias-before-reduce",
        why=f"{_named(base)} ({whole}){multiple} {added}: a sum over the ranks counts it {count}, and without one "
        "each rank continues with a different sum",
        fix=fix,
        on_some_ranks=_on_some_ranks(step, whole, base, added=added),
    )


def _on_some_ranks(step: Step, whole: SpmdType, base: Base, *, added: str) -> OnSomeRanks:
    """What is wrong where one rank adds the tensor for all: its value is right."""
    if not step.has_gradient(whole):
        return OnSomeRanks()
    effect = {
        "I": "they alone get a gradient of it",
        "R": "in the backward its copy_to_tp waits there for ranks that do not come",
    }
    return OnSomeRanks(
        "on-some-ranks",
        why=f"{_named(base)} ({whole}) {added} on some ranks and not on others: {effect[whole.kind]}",
        fix="all_reduce the partial sum first, then add on every rank; or add on every rank "
        "torch.where(rank_index == 0, copy_to_tp(x), 0)",
    )


def _part_of_gradient(
    step: Step, whole: SpmdType, base: Base, factor: Factor, wanted: float, *, added: str
) -> SpmdType:
    counted = factor.value * step.world
    count = "once" if is_close(counted, 1) else f"{counted:g} times"
    return step.flag(
        "gradient-of-a-share",
        why=f"{_named(base)} ({whole}) times {factor.value:g} {added} on each of the {step.world} ranks: the sum over "
        f"the ranks has it {count}, but its gradient through this op is {_ratio(factor.gradient / wanted)} the right "
        "one on every rank",
        fix=_FIXES[whole.kind],
    )


def _ratio(ratio: float) -> str:
    if abs(ratio) > 1:
        return f"{ratio:g} times"
    return f"1/{round(1 / ratio)} of" if is_close(1 / ratio, round(1 / ratio)) else f"{ratio:g} of"


def _named(base: Base) -> str:
    return f"parameter {base.name}" if base.name else "a replicated tensor"


_FIXES = {
    "I": "all_reduce the partial sum first, then add the whole tensor; or pass it through copy_to_tp before the "
    "division, whose backward adds up the gradients of the ranks",
    "R": "all_reduce the partial sum first, then add the whole tensor; copy_to_tp adds up the gradients of the ranks, "
    "so each of them must be a share, as the value is",
}
