"""Verdict -> GitHub Actions step summary and `::error` annotations."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpcompile.evidence.records import Check, Divergence, UserLine, Verdict
from tpcompile.report.wording import (
    accepted_lines,
    by_mode,
    cause_lines,
    failed,
    groups_text,
    headline,
    item_text,
    mode_title,
    named_ranks,
    outcome,
    plain,
    red,
    source_lines,
)

MAX_ERRORS = 10
"""GitHub shows ten errors per step and drops the others."""

MAX_SUMMARY_BYTES = 1_000_000
"""GitHub refuses a step summary over 1 MiB."""


def summary(verdict: Verdict) -> str:
    """The step summary, Markdown."""
    parts = [f"## tpcompile gate: {outcome(verdict)}", _cell(verdict.summary), f"*{_cell(headline(verdict))}*"]
    parts += [_checks(mode, checks) for mode, checks in by_mode(verdict).items()]
    parts += [_equal_ranks(verdict), *(_difference(d) for d in red(verdict)), _accepted(verdict)]
    text = "\n\n".join(part for part in parts if part) + "\n"
    if len(text.encode()) <= MAX_SUMMARY_BYTES:
        return text
    kept = text.encode()[:MAX_SUMMARY_BYTES].decode(errors="ignore")
    return f"{kept}\n\n(cut at 1 MB; the whole is in verdict.json)\n"


def annotations(verdict: Verdict, workspace: Path) -> list[str]:
    """At most ten `::error` lines: red divergences, then failed checks that blame no line annotated already."""
    divergences = red(verdict)
    blamed = {d.line for d in divergences} - {None}
    lines = [_error(d.line, d.title, _message(d), workspace) for d in divergences]
    lines += [_error(c.line, c.name, _check_message(c), workspace) for c in failed(verdict) if c.line not in blamed]
    if not lines and verdict.exit_code != 0:
        lines = [_error(None, "tpcompile gate", verdict.summary, workspace)]
    return list(dict.fromkeys(lines))[:MAX_ERRORS]


def write(verdict: Verdict, environ: Mapping[str, str]) -> list[str]:
    """In Actions, append the step summary and return the annotation lines to print; elsewhere do nothing."""
    if environ.get("GITHUB_ACTIONS") != "true":
        return []
    found = annotations(verdict, Path(environ.get("GITHUB_WORKSPACE") or Path.cwd()))
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        try:
            with Path(target).open("a", encoding="utf-8") as file:
                file.write(summary(verdict))
        except OSError as error:
            found.append(f"::warning title=tpcompile::{_escape(f'no step summary: {target}: {error.strerror}')}")
    return found


def _error(line: UserLine | None, title: str, message: str, workspace: Path) -> str:
    properties = {"title": title}
    if line is not None:
        properties = {"file": _relative(line.file, workspace), "line": str(line.line)} | properties
    text = ",".join(f"{key}={_escape_property(plain(value))}" for key, value in properties.items())
    return f"::error {text}::{_escape(plain(message))}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")


def _relative(file: str, workspace: Path) -> str:
    path = Path(os.path.normpath(file))
    if not path.is_absolute():
        return path.as_posix()
    for root in (workspace, workspace.resolve()):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.as_posix()


def _message(divergence: Divergence) -> str:
    groups = [f"{named_ranks(g.ranks)}: {item_text(g.item)}" for g in divergence.groups]
    head = [f"layer {divergence.layer.value}, {divergence.where}", *cause_lines(divergence)]
    return "\n".join([*head, *groups, divergence.advice]).rstrip()


def _check_message(check: Check) -> str:
    ranks = [named_ranks(check.ranks)] if check.ranks else []
    head = f"{mode_title(check.mode)}: expected {check.expected}; observed {check.observed}"
    return "\n".join([head, *ranks, *check.details])


def _checks(mode: str, checks: Sequence[Check]) -> str:
    rows = ["| check | expected | observed | status |", "|---|---|---|---|"]
    for check in checks:
        status = "**FAIL**" if check.is_red else check.status.value
        rows.append(f"| {_cell(check.name)} | {_cell(check.expected)} | {_cell(check.observed)} | {status} |")
    return f"### {mode_title(mode)}\n\n" + "\n".join(rows)


def _equal_ranks(verdict: Verdict) -> str:
    lines = (f"Equal ranks in {_cell(k)}: {_cell(groups_text(v))}" for k, v in sorted(verdict.domains.items()))
    return "\n\n".join(lines)


def _difference(divergence: Divergence) -> str:
    parts = [f"### {divergence.layer.value}: {_cell(divergence.title)}", _cell(divergence.where)]
    parts += [_cell(line) for line in cause_lines(divergence)]
    for group in divergence.groups:
        text = _fence([item_text(group.item), *source_lines(group.line)])
        parts.append(f"{named_ranks(group.ranks)}\n\n{text}")
    return "\n\n".join(part for part in [*parts, _cell(divergence.advice)] if part)


def _accepted(verdict: Verdict) -> str:
    lines = [f"- {_cell(line)}" for line in accepted_lines(verdict)]
    return "Accepted differences:\n\n" + "\n".join(lines) if lines else ""


def _fence(lines: list[str]) -> str:
    text = plain("\n".join(lines))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}\n{text}\n{ticks}"


def _cell(text: str) -> str:
    text = plain(text).replace("\n", " ")
    return re.sub(r"([\\`*_\[\]|<>#])", r"\\\1", text)
