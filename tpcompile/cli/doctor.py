"""`tpcompile doctor`: what this machine lacks, line by line, with what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tpcompile.errors import ExitCode

if TYPE_CHECKING:
    from rich.text import Text

    from tpcompile.doctor.finding import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")] = False,
) -> None:
    """Example: tpcompile doctor

    Look at torch, compiler, GPUs, caches, ports and known bad versions of this machine; exit 4 when tpcompile lacks
    something that it needs.
    """
    from tpcompile.doctor.examine import examine
    from tpcompile.doctor.finding import Level
    from tpcompile.report import console
    from tpcompile.report.stdout import forgiving, say

    screen = console.stdout()
    found = []
    for finding in examine(os.environ):
        found.append(finding)
        if not as_json:
            with forgiving():
                screen.print(_line(finding), soft_wrap=True)
    if as_json:
        import json

        say(json.dumps([finding.model_dump(mode="json") for finding in found], indent=1))
    is_missing = any(finding.level == Level.FAIL for finding in found)
    raise typer.Exit(ExitCode.ENVIRONMENT if is_missing else ExitCode.PASS)


def _line(finding: Finding) -> Text:
    """`warn  shared memory: ...`, and below it what to do."""
    from rich.text import Text

    from tpcompile.report.wording import plain

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.level]
    text = Text.assemble((f"{finding.level:<4}", style), f"  {plain(finding.name)}: {plain(finding.says)}")
    if finding.todo:
        text.append(f"\n      {plain(finding.todo)}", style="bold")
    return text
