"""A replicated tensor in a sum over the ranks -> right, counted several times, or with a part of its gradient.

The sum has it as often as the ranks' multiples of it make together. The gradient of a summand is the same on all ranks.
Of I each rank keeps what it gets, so it has to be the whole gradient; of R copy_to_tp adds up what the ranks get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpcompile.evidence.iterables import find
from tpcompile.typecheck.report import OnSomeRanks
from tpcompile.typecheck.scale import Base, Factor, is_close
from tpcompile.typecheck.spmd import UNKNOWN, SpmdType
from tpcompile.typecheck.step import Step


@dataclass(frozen=True)
class Summand:
    """A multiple of one replicated tensor that every rank adds."""

    base: Base
    factor: Factor
    type_: SpmdType
    """Of the value that it is a term of."""
    world: int

    @property
    def times(self) -> float:
        """How often the ranks' sum has the tensor."""
        return self.factor.value * self.world

    @property
    def is_share(self) -> bool:
        """True when the multiple is one rank's share of a tensor: nothing, 1 / size, or a number over it."""
        if is_close(self.times, 0):
            return True
        is_over_size = self.factor.is_shared and abs(self.factor.value) < 1
        return is_over_size or is_close(abs(self.times), 1)

    @property
    def may_be_share(self) -> bool:
        """True when a number of the user's may be beside size: `b / (2 * size)`, or `2 * b / size` where size is 2."""
        if self.is_share or self.factor.is_shared:
            return True
        divisor = 1 / abs(self.times)
        return divisor > 1 and is_close(divisor, round(divisor))

    @property
    def gradient_ratio(self) -> float:
        """The gradient that the tensor gets, over the right one; NaN where one of the two is not known, or is none."""
        wanted = self.times if self.type_.kind == "I" else self.factor.value
        if is_close(wanted, 0) or is_close(self.factor.gradient, 0):
            return math.nan
        return self.factor.gradient / wanted

    @property
    def has_wrong_gradient(self) -> bool:
        """True when the tensor gets more or less than its gradient."""
        ratio = self.gradient_ratio
        return not math.isnan(ratio) and not is_close(ratio, 1)

    def __str__(self) -> str:
        name = f"parameter {self.base.name}" if self.base.name else "a replicated tensor"
        return f"{name} ({self.type_})"


def summands(whole: SpmdType, world: int) -> list[Summand]:
    """The multiples that a replicated value is the sum of; empty where they are not known."""
    return [Summand(base, factor, whole, world) for base, factor in whole.multiples.terms.items()]


def wrong_summand(step: Step, whole: SpmdType, *, added: str, fix: str) -> SpmdType | None:
    """Report a value or a gradient that is wrong in a sum over the ranks; None when there is none.

    `added` says what the op does with the tensor, `fix` what to do where it is counted several times. The result is
    of unknown type where its numbers do not tell.
    """
    terms = summands(whole, step.world)
    counted = find(terms, lambda term: not term.may_be_share)
    if counted is not None:
        return _counted_several_times(step, counted, added=added, fix=fix)
    scaled = find(terms, lambda term: term.has_wrong_gradient)
    if scaled is not None and step.has_gradient(whole):
        return _scaled_gradient(step, scaled, added=added)
    # NaN: code of the user's, a hook, may change the gradient.
    is_unclear = any(math.isnan(term.factor.gradient) or not term.is_share for term in terms)
    return UNKNOWN if is_unclear or not terms else None


def _counted_several_times(step: Step, term: Summand, *, added: str, fix: str) -> SpmdType:
    named, count = str(term), f"{step.world} times"
    if not is_close(term.factor.value, 1):
        named = f"{named}, times {term.factor.value:g},"
        count = f"{count}: {term.times:g} of it"
    return step.flag(
        "bias-before-reduce",
        why=f"{named} {added}: a sum over the ranks counts it {count}, and without one each rank continues with a "
        "different sum",
        fix=fix,
        on_some_ranks=_on_some_ranks(step, term, added=added),
    )


def _on_some_ranks(step: Step, term: Summand, *, added: str) -> OnSomeRanks:
    """What is wrong where one rank adds the tensor for all: its value is right."""
    if not step.has_gradient(term.type_):
        return OnSomeRanks()
    origin = term.type_.origin
    effect = {
        "I": "they alone get a gradient of it",
        "R": "in the backward its copy_to_tp waits there for ranks that do not come",
    }
    return OnSomeRanks(
        "on-some-ranks",
        why=f"{term} {added} on some ranks and not on others: {effect[term.type_.kind]}",
        fix="all_reduce the partial sum first, then add on every rank; or add on every rank "
        "torch.where(rank_index == 0, copy_to_tp(x), 0)",
        collective=origin.site if origin is not None and term.type_.kind == "R" else None,
    )


def _scaled_gradient(step: Step, term: Summand, *, added: str) -> SpmdType:
    count = "once" if is_close(term.times, 1) else f"{term.times:g} times"
    parts = round(1 / term.gradient_ratio)
    is_part = is_close(term.gradient_ratio * parts, 1)
    ratio = f"1/{parts} of" if is_part else f"{term.gradient_ratio:g} times"
    return step.flag(
        "gradient-of-a-share",
        why=f"{term} times {term.factor.value:g} {added} on each of the {step.world} ranks: the sum over the ranks has "
        f"it {count}, but its gradient through this op is {ratio} the right one on every rank",
        fix=_FIXES[term.type_.kind],
    )


_FIXES = {
    "I": "all_reduce the partial sum first, then add the whole tensor; or pass it through copy_to_tp before the "
    "division, whose backward adds up the gradients of the ranks",
    "R": "all_reduce the partial sum first, then add the whole tensor; copy_to_tp adds up the gradients of the ranks, "
    "so each of them must be a share, as the value is",
}
