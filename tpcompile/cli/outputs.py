"""The flags that all commands with a verdict share, and the files that they name."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpcompile.errors import PreflightError

if TYPE_CHECKING:
    from tpcompile.evidence.records import Verdict
    from tpcompile.report.page.evidence import Evidence

STDOUT = Path("-")

Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="[FILE]", help="Write the verdict as JSON; without FILE, to stdout and nothing else."
    ),
]
OtherJson = Annotated[
    Path | None, typer.Option("--json", metavar="[FILE]", help="Write JSON; without FILE, to stdout and nothing else.")
]
"""The option of a command without a verdict."""
Junit = Annotated[Path | None, typer.Option("--junitxml", metavar="FILE", help="Write the verdict as JUnit XML.")]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page of the run: one file, no network.")
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print the outcome only.")]


def with_stdout(arguments: Sequence[str]) -> list[str]:
    """The arguments, with `-` as the file of a `--json` that names none: one at the end, or before another option."""
    found: list[str] = []
    after = [*arguments[1:], "--"]
    is_open = True
    for argument, following in zip(arguments, after, strict=False):
        is_open = is_open and argument != "--"  # what follows is the command of a job
        is_bare = is_open and argument == "--json" and following.startswith("-") and following != "-"
        found.append("--json=-" if is_bare else argument)
    return found


def put_json(value: object, file: Path | None) -> bool:
    """Write a value that is no verdict as JSON where it was asked for; True when it is on stdout, alone."""
    if file is None:
        return False
    import json

    text = json.dumps(value, indent=1) + "\n"
    if is_stdout(file):
        print(text, end="")
    else:
        write_text(file, text)
    return is_stdout(file)


def is_stdout(json: Path | None) -> bool:
    """True where the JSON goes to stdout, and nothing else may."""
    return json == STDOUT


def write(verdict: Verdict, *, json: Path | None = None, junitxml: Path | None = None) -> None:
    """Write the files that were asked for. Raises PreflightError for one that cannot be written."""
    if json is not None and not is_stdout(json):
        write_text(json, verdict.to_json(indent=1) + "\n")
    if junitxml is not None:
        from tpcompile.report import junit

        write_text(junitxml, junit.render(verdict))


def write_page(evidence: Evidence, path: Path) -> None:
    """Write the page of a run. Raises PreflightError when it cannot be written."""
    from tpcompile.report.page.html import page
    from tpcompile.report.page.tlparse import tlparse_pages
    from tpcompile.report.page.view import view_of

    if evidence.logs is not None:
        evidence = replace(evidence, tlparse=tlparse_pages(evidence.logs, path))
    write_text(path, page(view_of(evidence)))


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all. Raises PreflightError when it cannot be written."""
    from tpcompile.evidence.rundir import temporary

    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(text, encoding="utf-8")
            return
        os.replace(temporary(path.parent, text), path)
    except OSError as error:
        raise PreflightError(f"cannot write {path}: {error.strerror}") from None
