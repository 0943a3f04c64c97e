"""Ranks, groups and lines of a verdict -> the short text all reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tpcompile.errors import ExitCode
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.records import Check, Divergence, Item, UserLine, Verdict
from tpcompile.evidence.text.ranks import ranks_text

MAX_ITEM_CHARS = 2000
"""Longest item text a report prints; the whole of it stays in the rank's record."""


def named_ranks(ranks: Sequence[int]) -> str:
    """`rank 7` or `ranks 0-6`."""
    return f"{_ranks(len(ranks))} {ranks_text(ranks)}"


def _ranks(number: int) -> str:
    return "rank" if number == 1 else "ranks"


def groups_text(groups: Iterable[Sequence[int]]) -> str:
    """Groups of equal ranks: `((0, 1), (2,))` -> `"0-1 | 2"`."""
    return " | ".join(ranks_text(group) for group in groups)


def plain(text: str) -> str:
    r"""Text safe for terminals and XML: control characters and lone surrogates become `\x1b`-style escapes."""
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def item_text(item: Item | None) -> str:
    """What one group of ranks has at the difference."""
    if item is None:
        return "(nothing here)"
    text = plain(item.text)
    more = len(text) - MAX_ITEM_CHARS
    return text if more <= 0 else f"{text[:MAX_ITEM_CHARS]} (and {more} more characters, see record.json)"


def source_lines(line: UserLine | None, *, indent: str = "") -> list[str]:
    """A line of source and the code on it; nothing for none."""
    return [] if line is None else [f"{indent}{line}", f"    {line.code.strip()}"]


def cause_lines(divergence: Divergence) -> list[str]:
    """Cause, number of the call, and the guard on both sides: what is known of why the ranks differ."""
    odd = divergence.groups[-1].ranks if divergence.groups else ()
    usual = [rank for group in divergence.groups[:-1] for rank in group.ranks]
    lines = [f"cause: {divergence.cause.value}"] if divergence.cause != Cause.UNKNOWN else []
    if divergence.step is not None:
        lines.append(f"call {divergence.step}")
    if divergence.guard:
        lines.append(f"guard on {named_ranks(odd)}: {plain(divergence.guard)}")
    if divergence.held:
        lines.append(f"guard on {named_ranks(usual)}: {plain(divergence.held)}")
    return lines


def red(verdict: Verdict) -> list[Divergence]:
    """Divergences the gate fails on."""
    return [d for d in verdict.divergences if d.is_red]


def accepted(verdict: Verdict) -> list[Divergence]:
    """Divergences that are listed and green: declared, rank-parametric, label only."""
    return [d for d in verdict.divergences if not d.is_red]


def accepted_lines(verdict: Verdict) -> list[str]:
    """One line per accepted difference, with the reason where there is one."""
    return [_accepted_line(divergence) for divergence in accepted(verdict)]


def _accepted_line(divergence: Divergence) -> str:
    ranks = groups_text(group.ranks for group in divergence.groups)
    reason = f"; {divergence.advice}" if divergence.advice else ""
    return f"{divergence.cls.value}, {divergence.layer.value}: {divergence.title} (ranks {ranks}){reason}"


def failed(verdict: Verdict) -> list[Check]:
    """Checks that did not hold."""
    return [c for c in verdict.checks if c.is_red]


def by_mode(verdict: Verdict) -> dict[str, list[Check]]:
    """Mode -> its checks, in the order they appear; `""` holds the checks of the whole run."""
    found: dict[str, list[Check]] = {}
    for check in verdict.checks:
        found.setdefault(check.mode, []).append(check)
    return found


def mode_title(mode: str) -> str:
    """Heading of one mode's checks."""
    return f"mode {mode}" if mode else "run"


def outcome(verdict: Verdict) -> str:
    """`PASS (exit 0)`, `INCOMPLETE (exit 6)` or `FAIL (exit N)`."""
    words = {int(ExitCode.PASS): "PASS", int(ExitCode.INCOMPLETE): "INCOMPLETE"}
    return f"{words.get(verdict.exit_code, 'FAIL')} (exit {verdict.exit_code})"


def headline(verdict: Verdict) -> str:
    """What was run: preset, modes, ranks."""
    mode = f"mode {' '.join(verdict.modes)}" if verdict.modes else ""
    parts = [verdict.preset, mode, f"{verdict.world_size} {_ranks(verdict.world_size)}"]
    return plain(", ".join(part for part in parts if part))
