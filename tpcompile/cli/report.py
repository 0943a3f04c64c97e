"""`tpcompile report RUN`: one page of a run, and a trace for Perfetto; exit 0 when they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run directory of the gate, a check, a sentinel or `tpcompile run`; or TORCH_TRACE files.",
        ),
    ],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="The page; default: report.html in RUN.")
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option("--perfetto", metavar="FILE", help="What each rank did, as a trace for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Make a page of a run: the verdict, both sides where ranks parted, timeline, ranks, guards, kernels.

    Example: tpcompile report runs/20261128T092011-sentinel-d64a

    The page is one file that needs no network. The exit code says whether it was written, not what the verdict is.
    """
    from tpcompile.cli.compare import judge
    from tpcompile.cli.outputs import write_page, write_text
    from tpcompile.report.page.gather import gathered
    from tpcompile.report.page.perfetto import trace
    from tpcompile.report.stdout import say
    from tpcompile.report.wording import outcome

    with gathered(run, judge) as evidence:
        page = html or run / "report.html"
        write_page(evidence, page)
        say(f"{outcome(evidence.verdict)}; page: {page}")
        if perfetto is not None:
            write_text(perfetto, trace(evidence))
            say(f"trace for ui.perfetto.dev: {perfetto}")
