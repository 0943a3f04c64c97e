"""`tpcompile diagnose DIR`: TORCH_TRACE files of any job, or a run directory -> what differs between its ranks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpcompile.cli.outputs import Html, Json, Junit, Quiet
from tpcompile.errors import ConfigError

if TYPE_CHECKING:
    from tpcompile.evidence.logs.diagnose import Question


def diagnose(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Folders of TORCH_TRACE files, searched recursively, the files, or run directories of a sentinel.",
        ),
    ],
    world_size: Annotated[
        int | None, typer.Option(min=2, max=131_072, help="Ranks of the job; default: as many as the logs show.")
    ] = None,
    mesh: Annotated[
        str,
        typer.Option(
            "--mesh", metavar="dp=2,tp=4", help="Axes of the job, outermost first; default: read from the logs."
        ),
    ] = "",
    axis: Annotated[str, typer.Option(help="Axis of --mesh whose ranks must agree.")] = "tp",
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow", metavar="LAYER:TEXT:REASON", help="An intended difference: items of LAYER with TEXT; repeatable."
        ),
    ] = None,
    uneven: Annotated[
        list[str] | None,
        typer.Option(
            "--uneven", metavar="FUNCTION:REASON", help="A function whose content may differ by rank; repeatable."
        ),
    ] = None,
    ended_badly: Annotated[
        bool,
        typer.Option(
            "--ended-badly", help="The job crashed or hung: if its compiles agree, the exit code is 6, not 0."
        ),
    ] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory for the full report; default: runs/<utc time>-diagnose-<id>.")
    ] = None,
    quiet: Quiet = False,
    json: Json = None,
    junitxml: Junit = None,
    html: Html = None,
) -> None:
    """Compare the ranks of any job offline, from its TORCH_TRACE logs; exit 0 only when nothing observed differs.

    Example: tpcompile diagnose /shared/trace --ended-badly
    """
    from tpcompile.cli import outputs
    from tpcompile.evidence.logs.diagnose import examined
    from tpcompile.evidence.rundir import new_name
    from tpcompile.report import console, screen, show
    from tpcompile.report.stdout import forgiving
    from tpcompile.watched import holds_kept, with_kept

    question = _question(world_size, mesh, axis, allow or [], uneven or [], ended_badly)
    with ExitStack() as reading:
        try:
            found = reading.enter_context(examined(folders, question))
        except ConfigError:
            if not holds_kept(folders):
                raise
            found = None
        verdict = with_kept(folders, found.verdict if found is not None else None)
        assert verdict is not None, "one of them is there"
        outputs.write(verdict, json=json, junitxml=junitxml)
        if html is not None:
            if found is None:
                raise ConfigError(
                    "--html: a page is made of logs, of which there are none; omit it, or set TORCH_TRACE"
                )
            from tpcompile.report.page.of_logs import evidence_of_logs

            outputs.write_page(evidence_of_logs(found, name=", ".join(map(str, folders))), html)
    if quiet or outputs.is_stdout(json):
        amount = show.amount(quiet=quiet, json=outputs.is_stdout(json))
        show.show(verdict, console.stdout(), command="diagnose", amount=amount)
    else:
        folder = run_dir or Path(new_name("diagnose"))
        with forgiving():
            screen.render(
                verdict, console.stdout(), command="diagnose", folder=folder, is_asked_for=run_dir is not None
            )
    raise typer.Exit(verdict.exit_code)


def _question(
    world_size: int | None, mesh: str, axis: str, allow: list[str], uneven: list[str], ended_badly: bool
) -> Question:
    from tpcompile.evidence.logs.diagnose import Question
    from tpcompile.evidence.logs.domains import parse_mesh
    from tpcompile.evidence.records import Layer

    allowed = []
    for text in allow:
        layer, _, rest = text.partition(":")
        contains, _, reason = rest.rpartition(":")
        if layer not in list(Layer) or not contains or not reason:
            raise ConfigError(f"--allow {text}: write it as LAYER:TEXT:REASON, LAYER one of {', '.join(Layer)}")
        allowed.append((layer, contains, reason))
    declared = []
    for text in uneven:
        function, _, reason = text.partition(":")
        if not function or not reason:
            raise ConfigError(f"--uneven {text}: write it as FUNCTION:REASON")
        declared.append((function, reason))
    return Question(
        world_size=world_size,
        mesh=parse_mesh(mesh, axis) if mesh else None,
        allowed=tuple(allowed),
        uneven=tuple(declared),
        ended_badly=ended_badly,
    )
