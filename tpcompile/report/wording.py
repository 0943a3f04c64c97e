"""Ranks, groups and lines of a verdict -> the short text all reports share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from pathlib import PurePath

from tpcompile.choices import TARGET
from tpcompile.errors import ExitCode
from tpcompile.evidence.iterables import grouped
from tpcompile.evidence.judgement.leading import blamed_text
from tpcompile.evidence.records import (
    Check,
    Divergence,
    Item,
    ItemKind,
    Lead,
    Taint,
    UserLine,
    Verdict,
    items_of,
    ranks_of,
)
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.shortened import shortened, with_short_names
from tpcompile.evidence.text.phrases import listed, phrase
from tpcompile.evidence.text.ranks import axis_of, named_ranks, num_ranks, places_of, ranks_text
from tpcompile.evidence.timeline.conclude import led_to_text, side_text, usual_text

MAX_PLACES = 3
"""Compiles that are named of equal differences."""
MAX_ITEM_CHARS = 2000
"""Longest item text that a report prints; record.json of the rank holds all of it."""


def groups_text(groups: Iterable[Sequence[int]]) -> str:
    """Groups of equal ranks: `((0, 1), (2,))` -> `"0-1 | 2"`."""
    return " | ".join(ranks_text(group) for group in groups)


def plain(text: str) -> str:
    r"""Text safe for terminals and XML: control characters and lone surrogates become `\x1b`-style escapes.

    Names and lines that are too long to be printed lose their middle.
    """
    text = with_short_names(text.replace("\r\n", "\n").replace("\t", "    "))
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def item_text(item: Item | None) -> str:
    """The item of one group of ranks at the difference; without what it is about where its content says so as well."""
    if item is None:
        return "(nothing)"
    about, separator, content = item.text.partition(" :: ")
    is_said = separator and re.search(rf"(?<!\w){re.escape(about)}(?!\w)", content)
    text = content if is_said else item.text
    return shortened(plain(text), at_most=MAX_ITEM_CHARS)


def parted_text(lead: Lead | None) -> str:
    """What each side did where the ranks parted, unless the lead says it; empty where that is not known."""
    parted = lead.parted if lead is not None and not lead.consequence else None
    if parted is None:
        return ""
    return f"{'; '.join(map(side_text, parted.sides))}{usual_text(parted)}{led_to_text(parted)}"


SAID, _SHORT = "as said above", 80
"""What replaces a finding that stands above already, and the length from which on it does."""


def observed_text(check: Check, lead: Lead | None) -> str:
    """What a check observed; of what the lead says and is longer than a few words, that it stands above."""
    is_said = lead is not None and check.observed == lead.says and len(lead.says) > _SHORT
    return SAID if is_said else check.observed


def detail_lines(check: Check) -> list[str]:
    """The details of a check, each once, with the number of those that are equal."""
    counts = Counter(check.details)
    return [f"{detail} ({count} times)" if count > 1 else detail for detail, count in counts.items()]


def taints_by_line(verdict: Verdict) -> list[tuple[Taint, int]]:
    """The first value that depends on the rank of each line and grade, and how many more there are in that line."""
    alike = grouped(verdict.taints, lambda taint: (taint.line or taint.text, taint.grade, taint.reason))
    return [(first, len(others)) for first, *others in alike.values()]


def source_lines(line: UserLine | None, *, indent: str = "") -> list[str]:
    """A line of source and the code on it; empty when the line is not known."""
    return [] if line is None else [f"{indent}{line}", f"    {line.code.strip()}"]


def about_lines(divergence: Divergence) -> list[str]:
    """Layer and class, the place, then `cause_lines`."""
    domain = f"domain {divergence.domain}" if divergence.domain else ""
    where = phrase(divergence.where, domain)
    place = [f"in {where}"] if where else []
    return [f"layer {divergence.layer.value}: {divergence.cls.value}", *place, *cause_lines(divergence)]


def cause_lines(divergence: Divergence) -> list[str]:
    """Cause, step, and the guard on both sides, each where it is known; one line for a guard that is the same on both.

    A guard failed on the odd ranks, the last group, and `held` is what holds on the others. Where guards are what
    differs, the sides show them.
    """
    guard = plain(divergence.guard)
    held = plain(divergence.held)
    odd = named_ranks(ranks_of(divergence.groups[-1:]))
    usual = named_ranks(ranks_of(divergence.groups[:-1]))
    lines: list[str] = []
    if divergence.cause != Cause.UNKNOWN:
        lines.append(f"cause: {divergence.cause.value}")
    if divergence.step is not None:
        lines.append(f"step {divergence.step}")
    if any(divergence.guard in item.text for _, item in items_of(divergence.groups)):
        return lines
    if guard and divergence.guard == divergence.held:
        return [*lines, f"guard that failed on {odd} and holds on {usual}: {guard}"]
    if guard:
        lines.append(f"guard on {odd}: {guard}")
    if held:
        lines.append(f"guard on {usual}: {held}")
    return lines


def guard_line(verdict: Verdict) -> str:
    """The guard that explains the finding, on both sides; empty where there is none, or the finding is a guard itself.

    A collective or an op differs because a value did, which Dynamo has guarded.
    """
    lead = verdict.lead
    if lead is None:
        return ""
    for found in red(verdict):
        is_lead = found.cause == lead.cause and found.title in lead.says
        kinds = {item.kind for _, item in items_of(found.groups)}
        if is_lead and found.guard and found.held and kinds <= {ItemKind.NODE, ItemKind.COLLECTIVE}:
            odd, usual = named_ranks(ranks_of(found.groups[-1:])), named_ranks(ranks_of(found.groups[:-1]))
            return plain(f"guard on {odd}: {_expression(found.guard)}; on {usual}: {_expression(found.held)}")
    return ""


def _expression(guard: str) -> str:
    """The guard without the name of its type."""
    kind, separator, expression = guard.partition(": ")
    return expression if separator and kind.isupper() else guard


def annotation_title(cause: Cause, ranks: Sequence[int], *, is_known: bool, otherwise: str) -> str:
    """Cause and ranks; of an unknown cause the name of what failed."""
    what = otherwise if cause == Cause.UNKNOWN else cause.value
    if not ranks:
        return what
    return f"{what} ({blamed_text(ranks, is_known=is_known)})"


def red(verdict: Verdict) -> list[Divergence]:
    """Divergences the gate fails on."""
    return [divergence for divergence in verdict.divergences if divergence.is_red]


def red_by_kind(verdict: Verdict) -> list[list[Divergence]]:
    """The red divergences, with those together that differ in their compile or domain only."""
    return list(grouped(red(verdict), _kind).values())


def _kind(divergence: Divergence) -> Hashable:
    places = places_of([group.ranks for group in divergence.groups])
    title = divergence.title.replace(divergence.frame, "") if divergence.frame else divergence.title
    return divergence.layer, divergence.cls, axis_of(divergence.domain), divergence.cause, places, title


def more_alike(alike: Sequence[Divergence], *, at_most: int = MAX_PLACES) -> list[str]:
    """`and 65 more like it, in ...` below the first of several; empty for one."""
    others = alike[1:]
    if not others:
        return []
    places = listed(dict.fromkeys(divergence.where for divergence in others), by="; ", at_most=at_most)
    domains = dict.fromkeys(divergence.domain for divergence in alike)
    if len(domains) == 1:
        return [f"and {len(others)} more like it, in {places}"]
    odd = {rank for divergence in alike for rank in ranks_of(divergence.groups[-1:])}
    place = ranks_text(places_of([group.ranks for group in alike[0].groups])[-1])
    axis = axis_of(alike[0].domain)
    return [
        f"and {len(others)} more like it, in {places}: {axis} {place} of {len(domains)} groups, {named_ranks([*odd])}"
    ]


def do_first_label(lead: Lead) -> str:
    """`do first, on rank 1 in model.py:31`: the ranks are left out where it is not known which of them are wrong."""
    where = [f"on {named_ranks(lead.ranks)}"] if lead.is_rank_known and lead.ranks else []
    if lead.line is not None:
        path = PurePath(lead.line.file)
        # A program has several `__init__.py`.
        name = f"{path.parent.name}/{path.name}" if path.name == "__init__.py" else path.name
        where.append(f"in {name}:{lead.line.line}")
    return phrase("do first", " ".join(where))


def do_first_lines(lead: Lead | None) -> list[str]:
    """`do first, on rank 1 in model.py:31: Cast before the compiled region, on all ranks.`; empty without advice."""
    return [f"{do_first_label(lead)}: {lead.do_first}"] if lead is not None and lead.do_first else []


def more_lines(lead: Lead | None) -> list[str]:
    """The command that explains the cause, below what to do first; empty where no cause is known."""
    if lead is None or not lead.do_first or lead.cause == Cause.UNKNOWN:
        return []
    return [f"more: tpcompile explain {lead.cause.slug}"]


def accepted(verdict: Verdict) -> list[Divergence]:
    """Divergences that are listed but do not fail the gate: declared, rank-parametric, label only."""
    return [divergence for divergence in verdict.divergences if not divergence.is_red]


def accepted_lines(verdict: Verdict) -> list[str]:
    """One line per accepted difference, with the reason where there is one."""
    lines: list[str] = []
    for divergence in accepted(verdict):
        ranks = groups_text(group.ranks for group in divergence.groups)
        what = f"{divergence.cls.value}, {divergence.layer.value}: {divergence.title} (ranks {ranks})"
        lines.append("; ".join(filter(None, (what, divergence.advice))))
    return lines


def failed(verdict: Verdict) -> list[Check]:
    """Checks that failed."""
    return [check for check in verdict.checks if check.is_red]


def by_mode(verdict: Verdict) -> dict[str, list[Check]]:
    """Mode -> its checks, in the order they appear; `""` holds the checks of the whole run."""
    return grouped(verdict.checks, lambda check: check.mode)


def mode_title(mode: str) -> str:
    """Heading of one mode's checks."""
    if not mode:
        return "run"
    return mode if mode == TARGET else f"mode {mode}"


def outcome(verdict: Verdict) -> str:
    """`PASS (exit 0)`, `INCOMPLETE (exit 6)` or `FAIL (exit N)`."""
    words = {int(ExitCode.PASS): "PASS", int(ExitCode.INCOMPLETE): "INCOMPLETE"}
    return f"{words.get(verdict.exit_code, 'FAIL')} (exit {verdict.exit_code})"


def headline(verdict: Verdict) -> str:
    """What was run: preset, modes, ranks."""
    modes = " ".join(verdict.modes)
    mode = f"mode {modes}" if modes and modes != TARGET else ""
    return plain(phrase(verdict.preset, mode, num_ranks(verdict.world_size)))
