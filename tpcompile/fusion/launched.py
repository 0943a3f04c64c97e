"""Manifest of a graph -> its launches as items of the kernels layer, in which ranks are compared."""

from __future__ import annotations

from collections.abc import Mapping

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Item, ItemKind, LaunchedGraph
from tpcompile.fusion.manifest_records import GraphManifest, Launch, Role
from tpcompile.fusion.why_not import Missed, missed_fusions


def launched(graph: GraphManifest, settings: Mapping[str, str] | None = None) -> LaunchedGraph:
    """What each launch is and computes, without names of kernels, whose numbers say nothing; waits are left out."""
    if not graph.is_aligned:
        return LaunchedGraph(phase=graph.phase, is_known=False)
    apart: dict[int, Missed] = {}  # place of a launch -> the fusion with an earlier one that would save most
    for missed in missed_fusions(graph, settings or {}):  # the most first
        apart.setdefault(missed.places[1], missed)
    items = []
    for at, launch in enumerate(graph.launches):
        if launch.role is not Role.WAIT:
            notes = {}
            if at in apart:
                notes = {"from": says(graph.launches[apart[at].places[0]]), "apart": apart[at].reason.says}
            # One buffer more is made in memory where it was computed before.
            num_written = str(len(launch.writes)) if launch.role is Role.KERNEL else ""
            fields = {"launch": says(launch), "writes": num_written}
            line = first(launch.lines)
            items.append(Item(kind=ItemKind.LAUNCH, about="launch", fields=fields, notes=notes, line=line))
    return LaunchedGraph(phase=graph.phase, is_known=True, launches=tuple(items))


def says(launch: Launch) -> str:
    """Kind and ops: `poi mul sigmoid`; of what Inductor does not generate, the name: `extern_kernels.mm`."""
    if launch.role is not Role.KERNEL:
        return launch.name
    return " ".join([launch.kind, *(op.removeprefix("aten.") for op in launch.ops)])
