"""What the types show and what the numbers show -> one report: numbers decide where all was compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tpcompile.evidence.records import UserLine, WrongOp
from tpcompile.typecheck.beside_one import Numbers
from tpcompile.typecheck.report import Report, Violation
from tpcompile.typecheck.site import Site

WRONG_NUMBERS = "wrong-numbers"
WRONG_GRADIENT = "wrong-gradient"


def decided(report: Report, numbers: Numbers, *, train: bool) -> Report:
    """The report with what the numbers add to it.

    Where all outputs and gradients are right, nothing is wrong: what the types were taken for then is not what the
    program means. Where they are wrong, and the types show nothing, the op that they begin with is the finding.
    """
    report = replace(report, numbers=numbers)
    if numbers.is_right and (numbers.with_gradients or not train):
        kept = [each for each in report.violations if each.rule == "gradient-cut" and numbers.ungraded]
        return replace(report, violations=tuple(kept))
    if not numbers.wrong:
        return report
    return replace(report, violations=_in_order(_violation(numbers), report.violations, numbers.op))


def _in_order(found: Violation, typed: Sequence[Violation], op: WrongOp | None) -> tuple[Violation, ...]:
    """A rule that fits the same line says best what is wrong; else an op whose kind of mistake is known comes first."""
    same = [each for each in typed if (each.site.file, each.site.line) == (found.site.file, found.site.line)]
    if same:
        return (same[0], *(each for each in typed if each is not same[0]))
    is_named = op is not None and bool(op.kind)
    return (found, *typed) if is_named else (*typed, found)


def _violation(numbers: Numbers) -> Violation:
    is_gradient = all(name.startswith("grad ") for name in numbers.wrong)
    rule = WRONG_GRADIENT if is_gradient else WRONG_NUMBERS
    what = _named(numbers.wrong)
    begins = numbers.op
    if begins is None:
        why = f"{what}: not what one device returns with the same parameters, and it is not known where that begins"
        return Violation(rule, "output", (), Site(), why, _FIX, numbers.ranks)
    why = f"{what}: not what one device has with the same parameters. {begins.says}"
    return Violation(rule, begins.about, (), _site(begins), why, _FIX, numbers.ranks)


_FIX = "compare this op on a rank with what it does on one device"


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(name.replace("grad ", "gradient of ") for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _site(op: WrongOp) -> Site:
    line = op.line or UserLine(file="<unknown>", line=0)
    return Site(line.file, line.line, line.function, line.code, op.module)
