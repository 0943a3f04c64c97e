"""Verdict -> GitHub Actions step summary and `::error` annotations."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

from tpcompile.evidence.iterables import find
from tpcompile.evidence.judgement.checks import CAUSES
from tpcompile.evidence.judgement.equal_ranks import equal_ranks
from tpcompile.evidence.judgement.leading import blamed_text, first_sentence
from tpcompile.evidence.records import Check, Divergence, Lead, UserLine, Verdict
from tpcompile.evidence.records.base import at_text, lines_of
from tpcompile.evidence.text.hosts import on_hosts
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.timeline.conclude import side_text
from tpcompile.report.wording import (
    accepted_lines,
    annotation_title,
    by_mode,
    cause_lines,
    detail_lines,
    do_first_lines,
    failed,
    headline,
    item_text,
    mode_title,
    more_alike,
    outcome,
    plain,
    red,
    red_by_kind,
    source_lines,
)

MAX_ERRORS = 10
"""GitHub shows ten errors per step and drops the rest."""

MAX_SUMMARY_BYTES = 1_000_000
"""GitHub rejects a step summary larger than 1 MiB."""


def is_actions(environ: Mapping[str, str]) -> bool:
    """True within a job of GitHub Actions."""
    return environ.get("GITHUB_ACTIONS") == "true"


def summary(verdict: Verdict, *, title: str = "tpcompile gate") -> str:
    """The step summary, Markdown."""
    checks = [_checks(mode, checks) for mode, checks in by_mode(verdict).items()]
    accepted = "\n".join(f"- {_cell(line)}" for line in accepted_lines(verdict))
    text = _paragraphs(
        f"## {_cell(title)}: {outcome(verdict)}",
        _cell(verdict.summary),
        f"*{_cell(headline(verdict))}*",
        *checks,
        *(_cell(line) for line, _ in equal_ranks(verdict)),
        *(_difference(alike, verdict.hosts) for alike in red_by_kind(verdict)),
        f"Accepted differences:\n\n{accepted}" if accepted else "",
    )
    data = f"{text}\n".encode()
    if len(data) <= MAX_SUMMARY_BYTES:
        return f"{text}\n"
    kept = data[:MAX_SUMMARY_BYTES].decode(errors="ignore")
    return f"{kept}\n\n(cut at 1 MB; verdict.json has all of it)\n"


def section(title: str, text: str) -> str:
    """A part of the step summary that is no verdict."""
    return _paragraphs(f"## {_cell(title)}", _fence(text.splitlines())) + "\n"


def _paragraphs(*texts: str) -> str:
    """The texts that are not empty, an empty line between them."""
    return "\n\n".join(filter(None, texts))


def annotations(verdict: Verdict, workspace: Path) -> list[str]:
    """`::error` lines, ten at most and one for each cause: what follows from it is only in the report.

    A rank that died or never arrived explains what differs; what differs explains the failed checks without a line. The
    line that made it differ comes before the one that has the difference.
    """
    own = [check for check in failed(verdict) if not check.is_consequence]
    checks = [check for check in own if check.id in CAUSES]
    errors: list[str] = [_of_origin(verdict.lead, workspace)] if has_origin(verdict.lead) else []
    if not checks:
        divergences = _of_one_cause(red(verdict))
        annotated = {None, *lines_of(divergences)}
        checks = [check for check in own if check.line not in annotated]
        for found in divergences:
            groups = [f"{named_ranks(group.ranks)}: {item_text(group.item)}" for group in found.groups]
            head = f"layer {found.layer.value}, {found.where}"
            advice = first_sentence(found.advice)  # what else may be done, the report says
            message = "\n".join([found.title, head, *cause_lines(found), *groups, advice]).rstrip()
            ranks, is_known = found.culprits or found.ranks, bool(found.culprits)
            title = annotation_title(found.cause, ranks, is_known=is_known, otherwise=f"{found.layer.value} differs")
            errors.append(error(found.line, title, message, workspace))
    for check in checks:
        failed_text = f"failed: {check.name}"
        title = annotation_title(check.cause, check.ranks, is_known=check.is_rank_known, otherwise=failed_text)
        errors.append(error(check.line, title, _check_message(check), workspace))
    if verdict.exit_code != 0 and not errors:
        errors = [error(None, check.name, _check_message(check), workspace) for check in own[:1]]
        errors = errors or [error(None, "tpcompile gate", verdict.summary, workspace)]
    different = dict.fromkeys(errors)
    return list(different)[:MAX_ERRORS]


def has_origin(lead: Lead | None) -> TypeGuard[Lead]:
    """True where executed lines show what made the content of the ranks differ."""
    return lead is not None and lead.parted is not None and not lead.consequence and lead.line is not None


def _of_origin(lead: Lead, workspace: Path) -> str:
    sides = map(side_text, lead.parted.sides) if lead.parted is not None else ()
    title = annotation_title(lead.cause, lead.ranks, is_known=lead.is_rank_known, otherwise="the ranks differ")
    seen = at_text(lead.seen_at)
    message = "\n".join([f"here the ranks parted: {'; '.join(sides)}", f"so {lead.says}{seen}", *do_first_lines(lead)])
    return error(lead.line, title, message, workspace)


def _of_one_cause(divergences: Sequence[Divergence]) -> list[Divergence]:
    """The first of all differences with the same cause and line: one line of code may be compiled several times."""
    found: dict[object, Divergence] = {}
    for divergence in divergences:
        key = (divergence.cause, divergence.line) if divergence.line else divergence.title
        found.setdefault(key, divergence)
    return list(found.values())


def write(verdict: Verdict, environ: Mapping[str, str]) -> list[str]:
    """Append the step summary and return the annotation lines to print, in a job of Actions; elsewhere do nothing."""
    if not is_actions(environ):
        return []
    workspace = Path(environ.get("GITHUB_WORKSPACE") or Path.cwd())
    return annotations(verdict, workspace) + append_summary(summary(verdict), environ)


def append_summary(text: str, environ: Mapping[str, str]) -> list[str]:
    """Append to the step summary, where there is one; return a line that says why it cannot be written."""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if not target or not text:
        return []
    try:
        with Path(target).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        problem = _escape(f"no step summary: {target}: {error.strerror}")
        return [f"::warning title=tpcompile::{problem}"]
    return []


def error(line: UserLine | None, title: str, message: str, workspace: Path) -> str:
    """The workflow command that annotates a line."""
    properties = {"title": title}
    if line is not None:
        place = {"file": _relative(line.file, workspace), "line": str(line.line)}
        properties = place | properties
    escaped: list[str] = []
    for key, value in properties.items():
        text = _escape(plain(value)).replace(":", "%3A").replace(",", "%2C")
        escaped.append(f"{key}={text}")
    text = _escape(plain(message))
    for root in {str(workspace), str(workspace.resolve())}:
        text = text.replace(f"{_escape(root)}/", "")
    return f"::error {','.join(escaped)}::{text}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _relative(file: str, workspace: Path) -> str:
    """The path as GitHub expects it: from the root of the repository on, where it is inside."""
    path = Path(os.path.normpath(file))
    if not path.is_absolute():
        return path.as_posix()
    roots = (workspace, workspace.resolve())
    root = find(roots, path.is_relative_to)
    if root is None:
        return path.as_posix()
    return path.relative_to(root).as_posix()


def _check_message(check: Check) -> str:
    who = blamed_text(check.ranks, is_known=check.is_rank_known)
    ranks = [who] if who else []
    head = f"{mode_title(check.mode)}: expected {check.expected}; observed {check.observed}"
    return "\n".join([head, *ranks, *detail_lines(check)])


def _checks(mode: str, checks: Sequence[Check]) -> str:
    rows = ["| check | expected | observed | status |", "|---|---|---|---|"]
    for check in checks:
        status = "**FAIL**" if check.is_red else check.status.value
        texts = map(_cell, (check.name, check.expected, check.observed))
        cells = " | ".join([*texts, status])
        rows.append(f"| {cells} |")
    return f"### {mode_title(mode)}\n\n" + "\n".join(rows)


def _difference(alike: Sequence[Divergence], hosts: Mapping[str, Sequence[int]]) -> str:
    divergence = alike[0]
    texts = [
        f"### {divergence.layer.value}: {_cell(divergence.title)}",
        _cell(divergence.where),
        *map(_cell, cause_lines(divergence)),
    ]
    for group in divergence.groups:
        ranks = f"{named_ranks(group.ranks)}{on_hosts(group.ranks, hosts)}"
        texts += [_cell(ranks), _fence([item_text(group.item), *source_lines(group.line)])]
    return _paragraphs(*texts, *map(_cell, more_alike(alike)), _cell(divergence.advice))


def _fence(lines: list[str]) -> str:
    text = plain("\n".join(lines))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}\n{text}\n{ticks}"


def _cell(text: str) -> str:
    text = plain(text).replace("\n", " ")
    return re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", text)
