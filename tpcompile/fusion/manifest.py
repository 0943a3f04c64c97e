"""Generated code and the scheduler's decisions -> the manifest of a graph; manifests as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from tpcompile.fusion import files
from tpcompile.fusion.manifest_records import (
    SCHEMA_VERSION,
    Call,
    Decisions,
    GraphManifest,
    Launch,
    Manifest,
    Node,
    Role,
    Totals,
)
from tpcompile.fusion.wrapper import launches, phase_of

_ROLES = {"extern": Role.EXTERN, "collective": Role.COLLECTIVE, "wait": Role.WAIT, "copy": Role.COPY}
_NOT_LAUNCHED = ("nop", "output", "print")
"""Kinds of nodes that launch nothing; what is before and behind one is apart, unless it is `nop`, which has no code."""
_NO_KERNEL = (Role.WAIT,)
_NOT_SEEN = (
    "the scheduler was not seen: the code came from a cache that was filled without a recorder; empty the cache, or "
    "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
)
_BY_TORCH = (Role.COLLECTIVE, Role.WAIT)
"""Their bytes are not counted: what goes over the wire depends on the algorithm."""


def graph_manifest(
    code: str, decisions: Decisions | None, *, compile_id: str, is_cached: bool = False
) -> GraphManifest:
    """The launches of a graph in order, each with the nodes that it runs where they can be told."""
    calls, why_not = _calls(code)
    groups: list[list[Node]] = [[] for _ in calls]
    if decisions is None:
        why_not = why_not or _NOT_SEEN
    elif not why_not:
        groups, why_not = _aligned(calls, decisions.after)
    return GraphManifest(
        compile_id=compile_id,
        phase=phase_of(code),
        is_aligned=not why_not,
        why_not_aligned=why_not,
        is_cached=is_cached,
        launches=tuple(one for call, nodes in zip(calls, groups, strict=True) for one in _launches(call, nodes)),
        decisions=decisions,
    )


def _calls(code: str) -> tuple[Sequence[Call], str]:
    try:
        return launches(code), ""
    except SyntaxError:
        return (), "the wrapper is not Python (config.cpp_wrapper)"


def _aligned(calls: Sequence[Call], nodes: Iterable[Node]) -> tuple[list[list[Node]], str]:
    """The nodes of each call, and why they are not known: both are in order, and their roles must agree."""
    groups = _as_launched(nodes)
    by_node = [role for role, _ in groups]
    places = [at for at, call in enumerate(calls) if call.role is not Role.WRAPPER]
    by_code = [calls[at].role for at in places]
    found: list[list[Node]] = [[] for _ in calls]
    if by_node != by_code:
        return found, f"the code launches {_counted(by_code)}, the scheduler's nodes are {_counted(by_node)}"
    for at, (_role, members) in zip(places, groups, strict=True):
        found[at] = members
    return found, ""


def _as_launched(nodes: Iterable[Node]) -> list[tuple[Role, list[Node]]]:
    """The C++ backend makes one kernel of all that it computes between two nodes of any other kind but `nop`."""
    found = []
    for joined, group in groupby((one for one in nodes if one.kind != "nop"), key=_is_joined):
        if joined:
            found.append((Role.KERNEL, list(group)))
        else:
            found += [(_ROLES.get(one.kind, Role.KERNEL), [one]) for one in group if one.kind not in _NOT_LAUNCHED]
    return found


def _is_joined(one: Node) -> bool:
    return one.device == "cpu" and one.kind in ("pointwise", "reduction", "foreach")


def _counted(roles: Iterable[Role]) -> str:
    counts = Counter(roles)
    return ", ".join(f"{counts[role]} {role}" for role in Role if counts[role]) or "nothing"


def _launches(call: Call, nodes: Sequence[Node]) -> Iterator[Launch]:
    """One for each node: a C++ function runs several, one after the other, as if they were launches."""
    fields = call.model_dump()
    if not nodes:
        yield Launch(**fields)
    kept = {"parts", "fx", "made", "ops", "body", "loops", "reads", "writes", "lines"}
    for one in nodes:
        known = one.model_dump(include=kept)
        yield Launch(**fields, node=one.name, **known)


# Totals


def total(launched: Iterable[Launch]) -> Totals:
    """Kernels that are launched, library calls and copies among them, and their bytes without those of collectives."""
    counted = [one for one in launched if one.role not in _NO_KERNEL]
    return Totals(kernels=len(counted), bytes=sum(one.bytes for one in counted if one.role not in _BY_TORCH))


def total_of(parts: Iterable[Totals]) -> Totals:
    """Of several graphs."""
    every = list(parts)
    return Totals(kernels=sum(one.kernels for one in every), bytes=sum(one.bytes for one in every))


def total_before(decisions: Decisions) -> Totals:
    """The same if the scheduler had fused nothing."""
    nodes = [one for one in decisions.before if one.kind not in (*_NOT_LAUNCHED, "wait")]
    return Totals(kernels=len(nodes), bytes=sum(one.bytes for one in nodes if one.kind != "collective"))


def removed_round_trips(decisions: Decisions) -> tuple[str, ...]:
    """Buffers that fusion keeps in registers: written before it, and by no node after it."""
    before = {name for one in decisions.before for name in one.writes}
    after = {name for one in decisions.after for name in one.writes}
    return tuple(sorted(before - after))


# Files


def write(manifest: Manifest, path: Path) -> None:
    """As JSON, equal text for equal manifests."""
    files.write(manifest, path)


def read(path: Path) -> Manifest:
    """Raises ConfigError for a file that is not there, is no manifest, or has a different schema version."""
    return files.read(Manifest, path, version=SCHEMA_VERSION, made_by="tpcompile fusion record")
