"""What the types show and what the numbers show -> one report: numbers decide where all was compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.evidence.records import MistakeKind, UserLine, WrongOp
from tpcompile.typecheck import wording
from tpcompile.typecheck.report import DRAWN, Numbers, Report, Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.wording import Wording

_COMPARE = "compare what this line does on a rank with what it does on one device"
_NUMBERS = Wording("wrong-numbers", "", _COMPARE)
_GRADIENT = Wording("wrong-gradient", "", _COMPARE)
_RANDOM = Wording(
    "random-per-rank",
    "the program seeds the ranks differently, and here each rank applies its own random numbers to a value that all "
    "hold alike, or to its summand of one",
    "draw it after the reduce, with a generator that is seeded alike on all ranks",
)
_OF_KIND = {
    MistakeKind.NOT_SUMMED: wording.PARTIAL_USED,
    MistakeKind.PER_RANK: wording.COUNTED._replace(fix="all_reduce the partial sum first, then add"),
    MistakeKind.LOCAL_STATISTIC: wording.STATISTIC_USED,
    MistakeKind.GRADIENT_NOT_SUMMED: wording.MISSING_COPY,
}
"""Kinds of mistakes that rules find as well: the name of the rule, and its advice."""
_COMPILED, _CUT = (wording.NO_STATED_GRADIENT.rule,), "gradient-cut"
_MOST_NAMED = 3


def decided(report: Report, numbers: Numbers, *, train: bool) -> Report:
    """The report with what the numbers add to it.

    Where all outputs and gradients are right, nothing is wrong: what the types were taken for then is not what the
    program means. What eager gets right without a stated gradient stays a finding: compiled code may not. Where they
    are wrong, and the types show nothing, the op that they begin with is the finding.
    """
    report = replace(report, numbers=numbers)
    if numbers.is_right and (numbers.with_gradients or not train):
        kept = [
            each for each in report.violations if each.rule in _COMPILED or (each.rule == _CUT and numbers.ungraded)
        ]
        return replace(report, violations=tuple(kept))
    if not numbers.wrong:
        return report
    return replace(report, violations=_in_order(_violation(numbers), report.violations, numbers.op))


def _in_order(found: Violation, typed: Sequence[Violation], op: WrongOp | None) -> tuple[Violation, ...]:
    """A rule that says the same is more exact; else an op whose kind of mistake is known comes first."""
    same = []
    for each in typed:
        # On the same line; or of a partial value: numbers show where it is made, types where it is used as whole.
        is_same_line = (each.site.file, each.site.line) == (found.site.file, found.site.line)
        if is_same_line or each.rule == found.rule == wording.PARTIAL_USED.rule:
            same.append(each)
    if same:
        return (same[0], *(each for each in typed if each is not same[0]))
    is_named = op is not None and bool(op.kind)
    return (found, *typed) if is_named else (*typed, found)


def _violation(numbers: Numbers) -> Violation:
    is_gradient = all(name.startswith("grad ") for name in numbers.wrong)
    worded = _GRADIENT if is_gradient else _NUMBERS
    shown = ", ".join(name.replace("grad ", "gradient of ") for name in numbers.wrong[:_MOST_NAMED])
    if len(numbers.wrong) > _MOST_NAMED:
        shown += f" and {len(numbers.wrong) - _MOST_NAMED} more"
    why = f"{shown}: not what one device has with the same parameters"
    op, site = "output", Site()
    begins = numbers.op
    if begins is not None:
        worded = _OF_KIND.get(begins.kind, worded)
        why = f"{why}. Here it begins: {begins.says}"
        if numbers.wrong == (DRAWN,):
            worded, why = _RANDOM, _RANDOM.why
        line = begins.line or UserLine(file=site.file, line=0)
        op, site = begins.about, Site(line.file, line.line, line.function, line.code, begins.module)
    return Violation(worded.rule, op, (), site, why, worded.fix, numbers.ranks)
