"""`tpcompile diagnose DIR`: TORCH_TRACE files of any job -> what differs between its ranks, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of TORCH_TRACE files, searched recursively.")
    ],
    world_size: Annotated[
        int | None, typer.Option(min=2, help="Ranks of the job; default: as many as the logs show.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the verdict as JSON; - for stdout.")] = None,
    junitxml: Annotated[Path | None, typer.Option("--junitxml", help="Write the verdict as JUnit XML.")] = None,
) -> None:
    """Compare the ranks of any job offline, from its TORCH_TRACE logs; exit 0 only when nothing observed differs."""
    from rich.console import Console

    from tpcompile.errors import PreflightError
    from tpcompile.evidence import tracedir
    from tpcompile.report import junit, terminal

    verdict = tracedir.diagnose(folders, world_size=world_size)
    outputs = [(json, verdict.to_json(indent=1) + "\n"), (junitxml, junit.render(verdict))]
    for path, text in outputs:
        if path is None or str(path) == "-":
            continue
        try:
            path.write_text(text)
        except OSError as error:
            raise PreflightError(f"cannot write {path}: {error.strerror}") from None
    if str(json) == "-":
        print(outputs[0][1], end="")
    else:
        terminal.render(verdict, Console(), command="diagnose")
    raise typer.Exit(verdict.exit_code)
