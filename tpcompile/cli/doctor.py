"""`tpcompile doctor`: what this machine lacks, line by line, with what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import typer

from tpcompile.cli import outputs
from tpcompile.cli.outputs import OtherJson
from tpcompile.errors import ExitCode

if TYPE_CHECKING:
    from rich.text import Text

    from tpcompile.doctor.finding import Finding


def doctor(
    json: OtherJson = None,
) -> None:
    """Example: tpcompile doctor

    Look at torch, compiler, GPUs, caches, ports and known bad versions of this machine; exit 4 when tpcompile lacks
    something that it needs.
    """
    from tpcompile.doctor.examine import examine
    from tpcompile.doctor.finding import Level
    from tpcompile.report import console
    from tpcompile.report.stdout import forgiving

    screen = console.stdout()
    found = []
    for finding in examine(os.environ):
        found.append(finding)
        if not outputs.is_stdout(json):
            with forgiving():
                screen.print(_line(finding), soft_wrap=True)
    with forgiving():
        outputs.put_json([finding.model_dump(mode="json") for finding in found], json)
    is_missing = any(finding.level == Level.FAIL for finding in found)
    raise typer.Exit(ExitCode.ENVIRONMENT if is_missing else ExitCode.PASS)


def _line(finding: Finding) -> Text:
    from rich.text import Text

    from tpcompile.report.wording import plain

    style = {"ok": "green", "warn": "yellow", "fail": "bold red"}[finding.level]
    text = Text.assemble((f"{finding.level:<4}", style), f"  {plain(finding.name)}: {plain(finding.says)}")
    if finding.todo:
        text.append(f"\n      {plain(finding.todo)}", style="bold")
    return text
