"""Violations found on the checked ranks -> one text, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tpcompile.errors import DivergenceError
from tpcompile.evidence.records import WrongOp
from tpcompile.typecheck.site import Site

DRAWN = "random numbers"
"""What is wrong where ranks apply their own random numbers to what they hold alike, or to summands."""


@dataclass(frozen=True)
class Numbers:
    """What a run on all ranks shows beside one on one device."""

    is_right: bool = False
    """All outputs are right, and all gradients where they were asked for."""
    wrong: tuple[str, ...] = ()
    """Outputs or gradients that are wrong, e.g. `output 0` or `grad up.weight`."""
    op: WrongOp | None = None
    """Where it begins, where that is known."""
    ranks: tuple[int, ...] = ()
    """Ranks that have it."""
    with_gradients: bool = False
    """Gradients were compared."""
    ungraded: tuple[str, ...] = ()
    """Parameters that have no gradient on one device either: whether they should is not known.
    Empty for a program that records none: it does not train."""
    why_not: str = ""
    """Why the ranks are not compared with one device; empty where they are."""


@dataclass(frozen=True)
class OnSomeRanks:
    """A fault of an op that some ranks run and others do not; without a rule there is none."""

    rule: str = ""
    why: str = ""
    fix: str = ""
    collective: Site | None = None
    """Line of the collective whose backward the op may run on some ranks alone; None where there is none."""


@dataclass(frozen=True)
class Violation:
    """One op that its operands' SPMD types do not allow."""

    rule: str
    """Name of the violated rule, e.g. `bias-before-reduce`."""
    op: str
    """Op or wrapper, e.g. `aten.add` or `all_reduce`."""
    operands: tuple[str, ...]
    """SPMD types of its tensor operands, in order."""
    site: Site
    why: str
    """The effect on values or gradients."""
    fix: str
    """What to do."""
    ranks: tuple[int, ...] = ()
    """Checked ranks that have it."""
    on_some_ranks: OnSomeRanks | None = None
    """What is wrong where not every rank runs the op; None where that makes no difference."""

    def __str__(self) -> str:
        return (
            f"{self.rule}: {self.op}({', '.join(self.operands)}) on {_named(self.ranks)}\n"
            f"  at {self.site}\n  why: {self.why}\n  do: {self.fix}"
        )


@dataclass(frozen=True)
class Report:
    """Result of one check; the first violation is the finding, later ones may be its consequences."""

    tp: int
    ranks: tuple[int, ...]
    """Ranks whose forward was followed."""
    num_ops: int
    """Ops and collectives that ran, summed over the ranks; 0 means that nothing was checked."""
    violations: tuple[Violation, ...]
    num_judged: int = 0
    """Ops whose types are known, so that a fault in them would have been found."""
    not_followed_since: str = ""
    """The first op that no rule judges, or whose result has no known type, as `FunCopy at mlp.py:12`; empty when all
    were judged."""
    backward: frozenset[Site] = frozenset()
    """Lines of the collectives that run in the backward from the outputs."""
    numbers: Numbers | None = None
    """What a run of all ranks beside one device shows; None where there was none."""

    @property
    def finding(self) -> Violation | None:
        """The first violation in program order, None when there is none."""
        return self.violations[0] if self.violations else None

    @property
    def is_complete(self) -> bool:
        """True when every op was judged, and there was one: only then does no violation mean that there is none."""
        is_shown = self.numbers is not None and self.numbers.is_right
        return self.num_ops > 0 and (is_shown or self.num_judged == self.num_ops)

    def __str__(self) -> str:
        ranks = f"{_named(self.ranks)} of tp={self.tp}"
        checked = f"judged {self.num_judged} of {self.num_ops} ops on {ranks}{self._compared}"
        if self.violations:
            first, *rest = self.violations
            title = f"type check failed: {len(self.violations)} finding{'s' if rest else ''}, {checked}{self._lost}"
            later = [f"\nlater, may be a consequence\n{violation}" for violation in rest]
            return "\n".join([title, "", str(first), *later])
        if self.is_complete:
            return f"type check passed: {checked}"
        if not self.num_ops:
            return f"type check judged nothing: no op ran on {ranks}"
        return f"type check found nothing in the part that it followed: {checked}{self._lost}"

    @property
    def _compared(self) -> str:
        """How the numbers of all ranks were compared with those of one device; empty where nobody asked."""
        if self.numbers is None:
            return ""
        if self.numbers.why_not:
            return f"; numbers not compared: {self.numbers.why_not}"
        what = "outputs and gradients" if self.numbers.with_gradients else "outputs"
        return f"; {what} of all {self.tp} ranks {'equal' if self.numbers.is_right else 'differ from'} one device's"

    @property
    def _lost(self) -> str:
        """How many ops were not judged, and since which; empty where all were, or what a finding made is all."""
        is_compared = self.numbers is not None and not self.numbers.why_not
        if not self.not_followed_since or is_compared:
            return ""
        return f"; {self.num_ops - self.num_judged} not judged, not followed since {self.not_followed_since}"

    def raise_on_violation(self, *, strict: bool = False) -> None:
        """Raise DivergenceError with the whole text when there is a violation; with `strict`, unless all was judged."""
        if self.violations or (strict and not self.is_complete):
            raise DivergenceError(str(self))


def of_all_ranks(reports: Sequence[Report]) -> Report:
    """One report of the ranks that were followed, one report each."""
    causes = [report.not_followed_since for report in reports if report.not_followed_since]
    kept = []
    for violation in _merged(reports):
        found = _on_some_ranks(violation, reports)
        if found is None:
            causes.append(f"{violation.op} {violation.site.short}")
        else:
            kept.append(found)
    return Report(
        reports[0].tp,
        tuple(report.ranks[0] for report in reports),
        sum(report.num_ops for report in reports),
        tuple(kept),
        sum(report.num_judged for report in reports),
        causes[0] if causes else "",
    )


def _merged(reports: Sequence[Report]) -> tuple[Violation, ...]:
    """Each violation once, with the ranks that have it, in the order of the first rank that has it."""
    found: dict[tuple[str, str, str, int], Violation] = {}
    for report in reports:
        for violation in report.violations:
            key = (violation.rule, violation.op, violation.site.file, violation.site.line)
            known = found.setdefault(key, violation)
            ranks = {*known.ranks, *violation.ranks}
            found[key] = replace(known, ranks=tuple(sorted(ranks)))
    return tuple(found.values())


def _on_some_ranks(violation: Violation, reports: Sequence[Report]) -> Violation | None:
    """The violation as it is where a different rank does not run the op; None where there is none then."""
    alone = violation.on_some_ranks
    others = [report for report in reports if report.ranks[0] not in violation.ranks]
    if alone is None or not others:
        return violation
    # A rank that lost track may have run the op as well, so each of the other ranks has to be judged whole.
    are_judged = all(report.is_complete and not report.violations for report in others)
    if not are_judged:
        return violation
    # Nobody waits for a collective in the backward that the others run for a different op, or for a multiple of 0.
    all_run_it = all(alone.collective in report.backward for report in others)
    if not alone.rule or all_run_it:
        return None
    return replace(violation, rule=alone.rule, why=alone.why, fix=alone.fix)


def _named(ranks: tuple[int, ...]) -> str:
    """`rank 0` or `ranks 0, 3`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"
