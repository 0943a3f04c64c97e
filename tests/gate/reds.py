"""What a verdict must say about a fault, and whether it does."""

from __future__ import annotations

import linecache
import re
from dataclasses import dataclass

from tests.gate.runs import GateRun
from tpcompile.evidence.records import Check, CheckId, Layer, Status


@dataclass(frozen=True, kw_only=True)
class Red:
    """What a verdict must say about a fault."""

    check: CheckId | Layer
    """A check that must fail."""
    summary: str
    """Pattern in the one line for a human."""
    ranks: tuple[int, ...] | None = (0, 1)
    """None for whichever rank came first."""
    code: str = ""
    """User's code on the line that is blamed."""
    detail: str = ""
    """Pattern in the details of the check."""
    divergence: str = ""
    """Pattern in the title of the first divergence, of what the user wrote; empty when the ranks agree."""
    exit_code: int = 1
    train: bool = False
    lowered: bool = False
    """Seen in what AOTAutograd makes of the graph."""
    declared: str = ""
    """A kernel that the user vouches for."""


def check_named(run: GateRun, red: Red) -> None:
    """The verdict is red for the right reason, on the right ranks and line."""
    verdict = run.judged
    assert (verdict.status, verdict.exit_code) == (Status.FAIL, red.exit_code), verdict.summary
    assert red.check in run.failed(), sorted(run.failed())
    check = run.failed()[red.check]
    assert re.search(red.summary, verdict.summary), verdict.summary
    assert red.ranks in (None, check.ranks)
    assert any(re.search(red.detail, text) for text in ("", *check.details)), check.details
    check_line(check, red.code)
    titles = [d.title for d in verdict.divergences if d.is_red]
    assert bool(titles) == bool(red.divergence), titles
    if titles:
        assert verdict.divergences[0].layer in (Layer.ENVIRONMENT, Layer.GRAPH, Layer.GUARDS)
        assert re.search(red.divergence, titles[0])


def check_line(check: Check, code: str) -> None:
    """The blamed line holds that code, in the source as it is on disk."""
    if code:
        assert check.line is not None
        assert code in check.line.code
        assert linecache.getline(check.line.file, check.line.line).strip() == check.line.code
