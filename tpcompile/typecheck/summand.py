"""A replicated tensor in a sum over the ranks -> right, counted several times, or with a part of its gradient.

The sum has it as often as the ranks' multiples of it make together. The gradient of a summand is the same on all ranks.
Of I each rank keeps what it gets, so it has to be the whole gradient; of R copy_to_tp adds up what the ranks get.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tpcompile.evidence.iterables import find
from tpcompile.typecheck import wording
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
    """Type of the value that it is a term of."""
    world: int

    @property
    def times(self) -> float:
        """How often the ranks' sum has the tensor."""
        return self.factor.value * self.world

    @property
    def is_share(self) -> bool:
        """True when the multiple is one rank's share of a tensor: nothing, 1 / size, or a number over it."""
        is_over_size = self.factor.is_shared and abs(self.factor.value) < 1
        return is_over_size or is_close(self.times, 0) or is_close(abs(self.times), 1)

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
        return not math.isnan(self.gradient_ratio) and not is_close(self.gradient_ratio, 1)

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
    """Report the term; where one rank adds it for all its value is right, and at most its gradient is wrong."""
    times, count = "", f"{step.world} times"
    if not is_close(term.factor.value, 1):
        times = f", times {term.factor.value:g},"
        count = f"{count}: {term.times:g} of it"
    found = step.violation(wording.COUNTED, term=term, times=times, added=added, count=count, fix=fix)
    on_some = OnSomeRanks()
    if step.has_gradient(term.type_):
        of_kind = {"I": wording.ON_SOME_RANKS_I, "R": wording.ON_SOME_RANKS_R}[term.type_.kind]
        alone = step.violation(of_kind, term=term, added=added)
        entered_at = term.type_.origin.site if term.type_.origin.what and term.type_.kind == "R" else None
        on_some = OnSomeRanks(alone.rule, alone.why, alone.fix, entered_at)
    return step.flag(replace(found, on_some_ranks=on_some))


def _scaled_gradient(step: Step, term: Summand, *, added: str) -> SpmdType:
    count = "once" if is_close(term.times, 1) else f"{term.times:g} times"
    parts = round(1 / term.gradient_ratio)
    is_part = is_close(term.gradient_ratio * parts, 1)
    ratio = f"1/{parts} of" if is_part else f"{term.gradient_ratio:g} times"
    share = {"I": wording.SHARE_OF_I, "R": wording.SHARE_OF_R}[term.type_.kind]
    return step.flag(share, term=term, added=added, count=count, ratio=ratio)
