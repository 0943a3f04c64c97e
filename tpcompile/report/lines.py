"""Verdict -> lines for a pipe or a log, none of them folded: `grep` finds whole checks and paths.

One for each check that was judged; those that were not, and those that follow from others, share lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.judgement.leading import Hosts, blamed_text, cause_text, lead_ranks_text, short_summary
from tpcompile.evidence.judgement.rank_taint import value_text
from tpcompile.evidence.records import Check, Divergence, Lead, Status, UserLine, Verdict, items_of
from tpcompile.evidence.text.hosts import on_hosts
from tpcompile.evidence.text.ranks import named_ranks, ranks_text
from tpcompile.report.wording import (
    accepted_lines,
    cause_lines,
    detail_lines,
    do_first_lines,
    guard_line,
    headline,
    item_text,
    more_alike,
    more_lines,
    observed_text,
    outcome,
    parted_text,
    plain,
    red_by_kind,
    taints_by_line,
)

MAX_DETAILS = 8
"""Lines of detail of one failed check; verdict.json has all of them."""
MAX_DIFFERENCES = 10
"""Differences that are printed; verdict.json has all of them."""


def lines(verdict: Verdict, *, command: str) -> list[str]:
    """The whole report; `command` is the subcommand of tpcompile, for the title."""
    found = [f"tpcompile {command}: {headline(verdict)}"]
    if verdict.lead is not None:
        found += _lead(verdict.lead, guard_line(verdict))
    own = [check for check in verdict.checks if not check.is_consequence]
    found += [_check(check, verdict.lead) for check in own if check.status != Status.SKIPPED]
    skipped = grouped((check for check in own if check.status == Status.SKIPPED), lambda check: check.observed)
    found += [f"SKIPPED {', '.join(check.name for check in alike)}: {why}" for why, alike in skipped.items()]
    follows = [check.name for check in verdict.checks if check.is_consequence]
    found += [f"follows from it: {'; '.join(follows)}"] if follows else []
    found += [text for text, _ in equal_ranks(verdict)]
    found += [f"median ms per call: {mode} {ms:.3g}" for mode, ms in sorted(verdict.timings_ms.items())]
    found += _differences(red_by_kind(verdict), verdict.hosts)
    found += _taints(verdict)
    for cause in verdict.recompiles:
        times = f"{cause.count} times on {named_ranks(cause.ranks)}"
        found.append(_joined(f"recompiled by {cause.text}", times, _source(cause.line), cause.advice))
    found += [f"accepted difference: {text}" for text in accepted_lines(verdict)]
    found += last_lines(verdict, short_summary(verdict))
    return [plain(text).replace("\n", " | ") for text in found]


def last_lines(verdict: Verdict, summary: str = "") -> list[str]:
    """The outcome, what to do first, and where there is more about the cause; alone with the whole summary."""
    said = f"{outcome(verdict)}: {summary or verdict.summary}"
    return [said, *do_first_lines(verdict.lead), *more_lines(verdict.lead)]


def _lead(lead: Lead, guard: str) -> Iterator[str]:
    """The cause, its ranks and the line where it is seen; then where the ranks parted, if that is known."""
    seen = _source(lead.seen_at or lead.line)
    yield f"cause: {_joined(cause_text(lead), lead_ranks_text(lead), guard, seen)}"
    sides = parted_text(lead)
    if sides:
        at = f" {_source(lead.line)}" if lead.seen_at is not None else ""
        yield f"the ranks parted{at}: {sides}"


def _check(check: Check, lead: Lead | None) -> str:
    """`PASS mode C, graph breaks: 0 breaks on every rank (expected 0 breaks on every rank)`."""
    mode = f"mode {check.mode}, " if check.mode else ""
    observed = observed_text(check, lead)
    head = f"{check.status.value.upper()} {mode}{check.name}: {observed} (expected {check.expected})"
    if not check.is_red:
        return head
    ranks = blamed_text(check.ranks, is_known=check.is_rank_known, hosts=lead.hosts if lead is not None else {})
    source = _source(check.line) if lead is None or check.line not in (lead.line, lead.seen_at) else ""
    return _joined(head, ranks, source, *detail_lines(check)[:MAX_DETAILS])


def _differences(found: Sequence[Sequence[Divergence]], hosts: Hosts) -> Iterator[str]:
    for number, alike in enumerate(found[:MAX_DIFFERENCES], start=1):
        divergence = alike[0]
        head = f"difference {number} of {len(found)}"
        domain = f"domain {divergence.domain}" if divergence.domain else ""
        kind = f"layer {divergence.layer.value}: {divergence.cls.value}"
        yield f"{head}: {_joined(divergence.title, kind, divergence.where, domain, *cause_lines(divergence))}"
        is_one_line = not differ(group.line for group in divergence.groups)
        for group in divergence.groups:
            side = f"{named_ranks(group.ranks)}{on_hosts(group.ranks, hosts)}: {item_text(group.item)}"
            yield f"{head}, {_joined(side, '' if is_one_line else _source(group.line))}"
        if is_one_line and divergence.groups[0].line is not None:
            yield f"{head}, all of them {_source(divergence.groups[0].line)}"
        for text in more_alike(alike):
            yield f"{head}, {text}"
        if divergence.advice:
            yield f"{head}, what to do: {divergence.advice}"
    num_hidden = sum(map(len, found[MAX_DIFFERENCES:]))
    if num_hidden > 0:
        yield f"and {num_hidden} more differences in verdict.json"


def _taints(verdict: Verdict) -> Iterator[str]:
    for taint, num_more in taints_by_line(verdict):
        values = ", ".join(f"{ranks_text(ranks)}: {value_text(item)}" for ranks, item in items_of(taint.groups))
        kind = f"{taint.grade.value}: {taint.kind.value}"
        more = f"and {num_more} more in that line" if num_more else ""
        what = f"depends on the rank: {taint.what} {taint.text}"
        yield _joined(what, _source(taint.line), kind, values, more, taint.advice)


def _source(line: UserLine | None) -> str:
    """` at file:line in function: code`, empty when the line is not known."""
    if line is None:
        return ""
    code = line.code.strip()
    return f"at {line}: {code}" if code else f"at {line}"


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
