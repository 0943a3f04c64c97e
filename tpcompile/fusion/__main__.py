"""`python -m tpcompile.fusion ARGUMENTS`: the body of `tpcompile fusion`, in a process that may import torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tpcompile.cli import ending, outputs
from tpcompile.cli.outputs import OtherJson
from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import find
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion import baseline as baselines
from tpcompile.fusion import diff as differences
from tpcompile.fusion import manifest as manifests
from tpcompile.fusion import manifest_text as texts
from tpcompile.fusion import no_gpu
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.why_not import missed_fusions
from tpcompile.report import console

app = ending.new_app(
    no_args_is_help=True,
    help="""Which kernels a program became, what did not fuse and why, and what changed.

    Example: tpcompile fusion record my_model:build --nproc 8

    Then: tpcompile fusion show manifest.json
    """,
)
_MANIFEST = Annotated[Path, typer.Argument(help="Written by `tpcompile fusion record`.")]
_TARGET = Annotated[str, typer.Argument(help="package.module:build, as for `tpcompile gate --target`.")]
_NPROC = Annotated[int, typer.Option(min=1, help="Compile as rank 0 of so many; one process runs.")]
_DEVICE = Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")]
_ARCH = Annotated[
    str, typer.Option("--arch", help="sm_90 or sm_80: generate code for such a GPU, without one; runs nothing.")
]
_SETTINGS = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For `build`.")]
_MISSED = Annotated[int, typer.Option("--missed", min=0, help="How many missed fusions of each graph are shown.")]


@app.command(short_help="Compile a program once and write its manifest.")
def record(
    target: _TARGET,
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the manifest.")] = Path("manifest.json"),
    nproc: _NPROC = 1,
    device: _DEVICE = "auto",
    arch: _ARCH = "",
    with_resources: Annotated[
        bool,
        typer.Option("--resources", help="With --arch: compile the kernels, for their registers and shared memory."),
    ] = False,
    settings: _SETTINGS = None,
    missed: _MISSED = 5,
) -> None:
    """Compile a program in this process, run it once, and write its manifest. Collectives communicate nothing."""
    if with_resources and not arch:
        raise ConfigError("--resources is for --arch; on a GPU they are recorded without it")
    if arch:
        no_gpu.pretend(arch)  # before torch is imported
    from tpcompile.fusion import targets

    if arch:
        found = targets.record_without_gpu(target, settings or (), nproc=nproc, with_resources=with_resources)
    else:
        found = targets.record(target, settings or (), nproc=nproc, device=device)
    if not found.graphs:
        raise ConfigError(f"{target} compiled nothing with Inductor")
    manifests.write(found, out)
    _print(texts.manifest(found, num_missed=missed))
    _print([Text(f"written: {out}")])


@app.command(short_help="Show the launches and the largest misses.")
def show(manifest: _MANIFEST, missed: _MISSED = 5) -> None:
    """Show the launches of each graph in order, and the fusions that would save most."""
    _print(texts.manifest(manifests.read(manifest), num_missed=missed))


@app.command(short_help="Say why two launches are not one.")
def explain(
    manifest: _MANIFEST,
    first: Annotated[int, typer.Argument(help="Number of a launch, as `show` prints it.")],
    second: Annotated[int, typer.Argument(help="Number of a different launch.")],
    graph: Annotated[int, typer.Option(help="Number of the graph, from 0.")] = 0,
    json: OtherJson = None,
) -> None:
    """Say why two launches are not one, and what would change it."""
    known = manifests.read(manifest)
    low, high = sorted((first, second))
    if graph not in range(len(known.graphs)):
        raise ConfigError(f"there is no graph {graph}: the manifest has {len(known.graphs)}, from 0")
    launches = known.graphs[graph].launches
    if low == high or low < 0 or high >= len(launches):
        raise ConfigError(f"{low} and {high} are no two launches of graph {graph}, which has 0 to {len(launches) - 1}")
    missed = missed_fusions(known.graphs[graph], known.settings)
    found = find(missed, lambda one: one.places == (low, high))
    if found is None:
        raise ConfigError(f"launches {low} and {high} share no buffer: there is nothing to fuse")
    _tell(found, texts.pair(found), json)


@app.command(short_help="Make a manifest the limit of later ones.")
def baseline(
    manifest: _MANIFEST,
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the baseline; commit it.")],
) -> None:
    """Make what a manifest launches the limit of later ones, for `check` and `tpcompile gate --fusion-baseline`."""
    command = " ".join(["tpcompile", "fusion", *sys.argv[1:]])
    found = baselines.baseline_of(manifests.read(manifest), made_with=command)
    baselines.write(found, out)
    for number, graph in enumerate(found.graphs):
        counts = ", ".join(f"{count} {role}" for role, count in graph.launches.items())
        _print([Text(f"graph {number} {graph.phase}: {counts}; {len(graph.missed)} known missed fusions")])
    _print([Text(f"written: {out}")])


@app.command(short_help="Compare a manifest with a baseline.")
def check(
    manifest: _MANIFEST,
    limit: Annotated[Path, typer.Option("--baseline", help="Written by `tpcompile fusion baseline`.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Share by which bytes may grow.")] = baselines.TOLERANCE,
    json: OtherJson = None,
) -> None:
    """Compare a manifest with a baseline; what has improved leaves the baseline. Exits with 1 on a regression."""
    found = manifests.read(manifest)
    known = baselines.read(limit)
    baselines.check_same_build(known, torch=found.torch, triton=found.triton, device=found.device, path=limit)
    outcome = baselines.compare(known, found, tolerance=tolerance)
    if outcome.why_not:
        raise ConfigError(f"{manifest} cannot be compared: {outcome.why_not}")
    if outcome.better is not None:
        baselines.write(outcome.better, limit)
    _tell(outcome, texts.outcome(outcome, limit), json)
    raise typer.Exit(outcome.is_worse)


@app.command(short_help="Draw kernels and bytes, before and after.")
def plot(
    manifest: _MANIFEST,
    new: Annotated[Path | None, typer.Argument(help="A second manifest, drawn beside the first.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="File of the plot: .svg or .png.")] = Path("manifest.svg"),
) -> None:
    """Draw kernels and bytes before and after fusion, and each launch in order; needs matplotlib, the extra `plot`."""
    from tpcompile.fusion import plot as plots

    paths = [manifest] if new is None else [manifest, new]
    plots.write([(str(path), manifests.read(path)) for path in paths], out)
    _print([Text(f"written: {out}")])


@app.command(short_help="Compare two manifests.")
def diff(
    base: _MANIFEST,
    new: _MANIFEST,
    across_versions: Annotated[bool, typer.Option(help="Compare although torch differs.")] = False,
    json: OtherJson = None,
) -> None:
    """Compare two manifests, of two commits or of two ranks: structure, then code. Exits with 1 where they differ."""
    found = differences.diff(manifests.read(base), manifests.read(new), across_versions=across_versions)
    _tell(found, texts.difference(found), json)
    raise typer.Exit(found.change is not differences.Change.NONE)


@app.command(short_help="Take kinds of ops out, and time the rest.")
def bisect(
    target: _TARGET,
    nproc: _NPROC = 1,
    device: _DEVICE = "auto",
    arch: _ARCH = "",
    settings: _SETTINGS = None,
    json: OtherJson = None,
) -> None:
    """Take one kind of op after the other out of the graphs, and report which keeps kernels apart.

    For a test only: what a program without its casts or collectives computes is wrong. Its code is not run.
    """
    if arch:
        no_gpu.pretend(arch)  # before torch is imported
    from tpcompile.fusion import attempts, targets

    def compiled(variant: targets.Variant) -> Manifest:
        return targets.record_variant(target, settings or (), variant, nproc=nproc, device=device, arch=arch)

    found = attempts.bisect(compiled)
    _tell(found, texts.bisection(found), json)


def _print(lines: Iterable[Text]) -> None:
    """Folded on a terminal; elsewhere a line stays one."""
    out = console.stdout()
    for line in lines:
        parts = texts.folded(line, out.width) if out.is_terminal else [line]
        for part in parts:
            out.print(part, soft_wrap=True)


def _tell(found: Frozen, lines: Iterable[Text], json: Path | None) -> None:
    """The text, unless stdout is for the JSON alone."""
    if not outputs.put_json(found.model_dump(mode="json"), json):
        _print(lines)


if __name__ == "__main__":
    ending.run(app, "tpcompile fusion")
