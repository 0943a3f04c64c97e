"""`tpcompile gate`: run the gate under torchrun, end with its verdict."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tpcompile.cli import outputs, passed_on
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.request import GateRequest, flags_of

if TYPE_CHECKING:
    from tpcompile.launch import Plan


def gate(*, context: typer.Context, program: str | None, config_file: Path | None, **options: Any) -> None:
    """Run the gate on N ranks of this machine; exit 0 only when every rank compiled the same one graph.

    Example: tpcompile gate my_model:build --nproc 2

    In a job that torchrun or srun has started and without --nproc, this process is one of the ranks.
    """
    from tpcompile import launch, logs
    from tpcompile.report import console, show
    from tpcompile.report.stdout import say

    _ = config_file  # read by `_set_defaults`, before the flags that it has defaults for
    files = _Outputs(**{name: options.pop(name) for name in _Outputs._fields})
    _take_target(context, program, options)
    sources = {name: context.get_parameter_source(name) for name in options}
    from_file = {name for name, source in sources.items() if source is not None and source.name == "DEFAULT_MAP"}
    request = GateRequest(**options).without_defaults_of_block(from_file)
    if request.fault == "list":
        passed_on.become("tpcompile.gate.faults", ["list"])
    passed_on.require_torch()
    is_launcher = request.nproc is not None or not launch.is_rank(os.environ)
    _check_performance(request, is_launcher=is_launcher)
    amount = show.amount(quiet=files.quiet, json=outputs.is_stdout(files.json))
    if not is_launcher:
        files.refuse_files()
        launch.become_rank(request, amount)
    logs.setup(rank=0)
    plan = launch.plan(request)
    if amount == "all":
        say(f"{plan.nproc} ranks on {plan.device}, {plan.config.title}, run directory {plan.run_dir}")
    code = launch.run(plan, console.stdout(), amount=amount)
    files.write(Path(plan.run_dir))
    if request.performance is not None and code == ExitCode.PASS:
        from tpcompile.cli.bench import run_bench

        code = run_bench(_arguments_of_bench(request, plan), stdout=sys.stderr if amount == "json" else None)
    raise typer.Exit(code)


class _Outputs(NamedTuple):
    quiet: bool
    json: Path | None
    junitxml: Path | None
    html: Path | None

    def refuse_files(self) -> None:
        """Raise ConfigError for a file that a rank of a job cannot write: the verdict is of all of them."""
        files = {"--json": self.json, "--junitxml": self.junitxml, "--html": self.html}
        for name, file in files.items():
            if file is not None and not outputs.is_stdout(file):
                raise ConfigError(
                    f"{name} {file}: in a job its run directory has verdict.json and junit.xml; `tpcompile report` "
                    "makes the page of it"
                )

    def write(self, run_dir: Path) -> None:
        """Write the files of a run that has a verdict."""
        from tpcompile.evidence.rundir import RunDir

        run = RunDir(run_dir)
        verdict = run.read_verdict()
        if verdict is None:
            return
        outputs.write(verdict, json=self.json, junitxml=self.junitxml)
        if self.html is not None:
            from tpcompile.report.page.of_run import evidence_of_run

            outputs.write_page(evidence_of_run(run, verdict), self.html)


def _take_target(context: typer.Context, program: str | None, options: dict[str, Any]) -> None:
    """Put a target that was given as an argument where --target puts it. Raises ConfigError for two."""
    if program is None:
        return
    source = context.get_parameter_source("target")
    if source is not None and source.name == "COMMANDLINE" and options["target"] != program:
        raise ConfigError(f"two targets: {program} and --target {options['target']}; give one")
    options["target"] = program


def _check_performance(request: GateRequest, *, is_launcher: bool) -> None:
    """Raise ConfigError, before a rank starts, where the benchmark cannot run what the gate runs."""
    if request.performance is None:
        return
    if request.target is not None:
        raise ConfigError("--performance is for the gate's own block; for a target there is `tpcompile verify-win`")
    if not is_launcher:
        raise ConfigError("--performance starts ranks of its own; run `tpcompile gate --nproc N` outside of the job")
    if request.device == "one_gpu":
        raise ConfigError("--performance needs a GPU for each rank, and with --device one_gpu they share one")
    if not request.performance.exists():
        raise ConfigError(f"--performance {request.performance}: no such file; make it by `tpcompile bench`")


def _arguments_of_bench(request: GateRequest, plan: Plan) -> list[str]:
    """The gate's preset in the same form, as arguments of `tpcompile bench`."""
    found = ["--baseline", str(request.performance), "--preset", plan.config.preset]
    found += ["--nproc", str(plan.nproc), "--device", plan.device, "--logs", str(plan.run_dir / "bench")]
    if request.train:
        found.append("--train")
    if request.layers is not None:
        found += ["--layers", str(request.layers)]
    for override in request.overrides or ():
        found += ["--set", override]
    if request.dtype:
        found += ["--set", f"block.dtype={request.dtype}"]
    return found


def _set_defaults(context: typer.Context, file: Path | None) -> Path | None:
    """Take defaults of the other flags from `--config`, else from pyproject.toml."""
    if not context.resilient_parsing:  # shell completion reads no files
        from tpcompile.cli.defaults import defaults

        context.default_map = {**(context.default_map or {}), **defaults(file, Path.cwd())}
    return file


def _parameters() -> Iterator[inspect.Parameter]:
    """The fields of a request, as typer reads flags off a signature, and what concerns the output only."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    yield inspect.Parameter("context", keyword, annotation=typer.Context)
    target = typer.Argument(metavar="TARGET", help="Gate your own program: MODULE:FUNCTION, as --target.")
    yield inspect.Parameter("program", keyword, default=None, annotation=Annotated[str | None, target])
    for field, kind, flag in flags_of(GateRequest):
        spelling = f"{flag.spelling}/--no-{flag.spelling.removeprefix('--')}" if kind is bool else flag.spelling
        option = typer.Option(spelling, help=flag.help, metavar=flag.metavar, min=flag.minimum)
        value = kind if field.default is not None else kind | None
        yield inspect.Parameter(field.name, keyword, default=field.default, annotation=Annotated[value, option])
    for name, annotation, default in (
        ("quiet", outputs.Quiet, False), ("json", outputs.Json, None), ("junitxml", outputs.Junit, None),
        ("html", outputs.Html, None),
    ):  # fmt: skip
        yield inspect.Parameter(name, keyword, default=default, annotation=annotation)
    config = typer.Option(
        "--config", help="TOML file with defaults of these flags; default: [tool.tpcompile] of pyproject.toml.",
        metavar="FILE", is_eager=True, callback=_set_defaults,
    )  # fmt: skip
    yield inspect.Parameter("config_file", keyword, default=None, annotation=Annotated[Path | None, config])


gate.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
