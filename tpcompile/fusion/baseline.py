"""A manifest that was good -> what a later one must not exceed: launches by role, and bytes; names never count."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion import record_files
from tpcompile.fusion.launched import says
from tpcompile.fusion.manifest import total
from tpcompile.fusion.manifest_records import GraphManifest, Manifest, Role
from tpcompile.fusion.why_not import Missed, missed_fusions

BASELINE_VERSION = 2
"""Incremented when a baseline changes shape; a reader refuses any other version."""
TOLERANCE = 0.05
"""Bytes may grow by this share: padding and size hints move them by a few percent."""


class GraphBaseline(Frozen):
    """What one graph may launch."""

    phase: str
    launches: dict[str, int]
    """Role -> how many, without waits."""
    bytes: int
    """Read and written, without collectives."""
    missed: tuple[str, ...] = ()
    """Fusions that were missed then, as texts: they are no reason for a regression."""


class Baseline(Frozen):
    """What a program may launch, on one version of torch and Triton, one architecture, with these fast paths."""

    schema_version: int = BASELINE_VERSION
    torch: str
    device: str
    """Architecture: `cpu`, `sm_90`."""
    triton: str = ""
    """Empty where no kernel was generated for it, and in baselines that were made before it was recorded."""
    settings: dict[str, str] = {}
    """Compile-relevant settings that differed from their default."""
    sources: dict[str, str] | None = None
    """Fast paths that its graphs call -> hashes of their sources; None in baselines from before it was recorded."""
    made_with: str = ""
    """The command."""
    graphs: tuple[GraphBaseline, ...]


class Regression(Frozen):
    """A graph that launches or moves more than its baseline."""

    says: str
    reasons: tuple[str, ...] = ()
    """Fusions that are newly missed, those between two kernels first; each with what would change it."""
    line: UserLine | None = None
    """The user's line of the first of them."""

    @property
    def text(self) -> str:
        """What there is more of, and the first reason."""
        return "; ".join([self.says, *self.reasons[:1]])


class Outcome(Frozen):
    """A manifest against a baseline."""

    regressions: tuple[Regression, ...] = ()
    better: Baseline | None = None
    """The baseline without what the manifest no longer needs; None where nothing has improved."""
    why_not: str = ""
    """Why they could not be compared."""

    @property
    def is_worse(self) -> bool:
        """True when something has regressed."""
        return bool(self.regressions)


def baseline_of(manifest: Manifest, *, made_with: str = "") -> Baseline:
    """What this manifest launches. Raises ConfigError where a graph's launches are not known."""
    if reason := _unknown(manifest):
        raise ConfigError(f"no baseline can be made: {reason}")
    graphs = tuple(map(_graph, manifest.graphs))
    return Baseline(
        torch=manifest.torch.partition("+")[0],  # without what it was built for: 2.13.0+cpu is 2.13.0
        device=manifest.device,
        triton="" if manifest.device == "cpu" else manifest.triton,
        settings=manifest.settings,
        sources=manifest.sources,
        made_with=made_with,
        graphs=graphs,
    )


def check_same_build(baseline: Baseline, *, torch: str, triton: str, device: str, path: Path) -> None:
    """Raise ConfigError for a baseline of a different torch, Triton or architecture: kernels differ by nature."""
    ours, theirs = f"torch {torch.partition('+')[0]}", f"torch {baseline.torch}"
    if baseline.triton and device != "cpu":
        ours, theirs = f"{ours}, Triton {triton}", f"{theirs}, Triton {baseline.triton}"
    if (theirs, baseline.device) != (ours, device):
        raise ConfigError(
            f"{path} is for {theirs} on {baseline.device}, and this is {ours} on {device}; "
            "make one for this build with `tpcompile fusion baseline`"
        )


def compare(baseline: Baseline, manifest: Manifest, *, tolerance: float = TOLERANCE) -> Outcome:
    """What regressed, and what has improved, graph by graph in order; only for the same graphs."""
    reason = _unknown(manifest) or _other_graphs(baseline, manifest) or _other_sources(baseline, manifest)
    if reason:
        return Outcome(why_not=reason)
    regressions = []
    for number, before in enumerate(baseline.graphs):
        graph = manifest.graphs[number]
        said = _exceeded(before, graph, tolerance)
        if said:
            regressions.append(_regression(f"graph {number} {graph.phase}: {', '.join(said)}", before, graph, manifest))
    if regressions:
        return Outcome(regressions=tuple(_with_settings(found, baseline, manifest) for found in regressions))
    pairs = zip(baseline.graphs, manifest.graphs, strict=True)
    limits = tuple(_smaller(before, _graph(graph)) for before, graph in pairs)
    better = baseline.model_copy(update={"graphs": limits}) if limits != baseline.graphs else None
    return Outcome(better=better)


def _unknown(manifest: Manifest) -> str:
    """Why the launches are not all known; empty where they are."""
    if not manifest.graphs:
        return "no graph was compiled with Inductor while fusion was recorded"
    graph = first(graph for graph in manifest.graphs if not graph.is_aligned)
    return f"graph {graph.compile_id or '-'} {graph.phase}: {graph.why_not_aligned}" if graph else ""


def _other_graphs(baseline: Baseline, manifest: Manifest) -> str:
    """Empty where both have the same graphs; a run without its backward must not become the baseline."""
    then = [graph.phase for graph in baseline.graphs]
    now = [graph.phase for graph in manifest.graphs]
    if now == then:
        return ""
    return f"the graphs are {', '.join(now)}, and those of the baseline {', '.join(then)}"


def _other_sources(baseline: Baseline, manifest: Manifest) -> str:
    """Empty where both call the same fast paths of the same source."""
    known = baseline.sources
    if known is None:
        return ""
    for name in sorted(known.keys() | manifest.sources.keys()):
        then, now = known.get(name), manifest.sources.get(name)
        if then is None or now is None:
            calls = "calls" if then is None else "does not call"
            return f"this program {calls} fast path {name}, unlike that of the baseline: make the baseline again"
        if then != now:
            return f"fast path {name} has source {now}, and in the baseline {then}: make the baseline again"
    return ""


def _with_settings(found: Regression, baseline: Baseline, manifest: Manifest) -> Regression:
    """The regression with the settings that differ as its last reason."""
    differ = []
    for name in sorted(baseline.settings.keys() | manifest.settings.keys()):
        then = baseline.settings.get(name, "default")
        now = manifest.settings.get(name, "default")
        if then != now:
            differ.append(f"{name} {then} / {now}")
    if not differ:
        return found
    reason = f"settings then / now: {', '.join(differ)}"
    return found.model_copy(update={"reasons": (*found.reasons, reason)})


def _graph(graph: GraphManifest) -> GraphBaseline:
    return GraphBaseline(
        phase=graph.phase,
        launches=_counted(graph),
        bytes=total(graph.launches).bytes,
        missed=tuple(sorted(_text(graph, one) for one in missed_fusions(graph))),
    )


def _counted(graph: GraphManifest) -> dict[str, int]:
    counts = Counter(launch.role for launch in graph.launches)
    return {str(role): counts[role] for role in Role if counts[role] and role is not Role.WAIT}


def _text(graph: GraphManifest, missed: Missed) -> str:
    """`poi add and poi relu: size limit`, without names and bytes, which change with the model's sizes."""
    return f"{_pair(graph, missed)}: {missed.reason.boundary}"


def _pair(graph: GraphManifest, missed: Missed) -> str:
    return " and ".join(says(graph.launches[at]) for at in missed.places)


# Worse


def _exceeded(before: GraphBaseline, graph: GraphManifest, tolerance: float) -> list[str]:
    """What there is more of in a graph than in its baseline."""
    said = []
    for role, count in _counted(graph).items():
        known = before.launches.get(role, 0)
        if count > known:
            said.append(f"{count} {role} launches instead of {known}")
    moved = total(graph.launches).bytes
    if moved > before.bytes * (1 + tolerance):
        said.append(f"{moved:,} bytes instead of {before.bytes:,}")
    return said


def _regression(says: str, before: GraphBaseline, graph: GraphManifest, manifest: Manifest) -> Regression:
    """What a graph has more of, and why: the fusions that are newly missed, those between two kernels first."""
    # Missed fusions that the baseline does not know, those that save most first.
    known = Counter(before.missed)
    newly = []
    for one in missed_fusions(graph, manifest.settings):
        text = _text(graph, one)
        if known[text]:
            known[text] -= 1
        else:
            newly.append(one)
    launches = graph.launches
    newly.sort(key=lambda missed: not all(launches[at].role is Role.KERNEL for at in missed.places))
    reasons: list[str] = []
    lines: list[UserLine] = []
    for missed in newly:
        reasons.append(f"{_pair(graph, missed)} are two launches: {missed.reason.says}")
        lines += missed.lines
    for launch in launches:
        lines += launch.lines
    return Regression(says=says, reasons=tuple(reasons), line=first(lines))


# Better


def _smaller(before: GraphBaseline, now: GraphBaseline) -> GraphBaseline:
    """The smaller of both, in each number; missed fusions that are gone leave it, new ones do not enter."""
    counts = {role: min(count, now.launches.get(role, 0)) for role, count in before.launches.items()}
    still = Counter(before.missed) & Counter(now.missed)
    return GraphBaseline(
        phase=before.phase,
        launches={role: count for role, count in counts.items() if count},
        bytes=min(before.bytes, now.bytes),
        missed=tuple(sorted(still.elements())),
    )


# Files

write = record_files.write
read = partial(record_files.read, Baseline, version=BASELINE_VERSION, made_by="tpcompile fusion baseline")
"""Raises ConfigError for a file that is not there, is no baseline, or has a different schema version."""
