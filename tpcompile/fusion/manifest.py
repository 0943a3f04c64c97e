"""Generated code and the scheduler's decisions -> the manifest of a graph; manifests as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from tpcompile.evidence.text.code import parse_kernels
from tpcompile.evidence.text.normalise import GroupRoles
from tpcompile.fusion import record_files
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
from tpcompile.fusion.wrapper import launches

_ROLES = {"extern": Role.EXTERN, "collective": Role.COLLECTIVE, "wait": Role.WAIT, "copy": Role.COPY}
_NOT_LAUNCHED = ("nop", "output", "print")
"""Kinds of nodes that launch nothing; what is before and behind one is apart, unless it is `nop`, which has no code."""
_NOT_SEEN = (
    "the scheduler was not seen: the code came from a cache that was filled without a recorder; empty the cache, or "
    "set TORCHINDUCTOR_FORCE_DISABLE_CACHES=1"
)


def graph_manifest(
    code: str, decisions: Decisions | None, *, compile_id: str, is_cached: bool = False
) -> GraphManifest:
    """The launches of a graph in order, each with the nodes that it runs where they can be told."""
    calls: Sequence[Call] = ()
    groups: list[list[Node]] = []
    try:
        calls = launches(code)
    except SyntaxError:
        why_not = "the wrapper is not Python (config.cpp_wrapper)"
    else:
        groups, why_not = _aligned(calls, decisions.after) if decisions else ([[] for _ in calls], _NOT_SEEN)
    launched: list[Launch] = []
    for call, nodes in zip(calls, groups, strict=True):
        launched += _launches(call, nodes)
    phase, _kernels = parse_kernels(code, roles=GroupRoles({}))
    return GraphManifest(
        compile_id=compile_id,
        phase=phase,
        is_aligned=not why_not,
        why_not_aligned=why_not,
        is_cached=is_cached,
        launches=tuple(launched),
        decisions=decisions,
    )


def _aligned(calls: Sequence[Call], nodes: Iterable[Node]) -> tuple[list[list[Node]], str]:
    """The nodes of each call, and why they are not known: both are in order, and their roles must agree."""
    groups = _as_launched(nodes)
    by_node = [role for role, _ in groups]
    by_code = [call.role for call in calls if call.role is not Role.WRAPPER]
    if by_node != by_code:
        why_not = f"the code launches {_counted(by_code)}, the scheduler's nodes are {_counted(by_node)}"
        return [[] for _ in calls], why_not
    members = iter(groups)
    found = []
    for call in calls:
        is_of_node = call.role is not Role.WRAPPER
        found.append(next(members)[1] if is_of_node else [])
    return found, ""


def _as_launched(nodes: Iterable[Node]) -> list[tuple[Role, list[Node]]]:
    """The C++ backend makes one kernel of all that it computes between two nodes of any other kind but `nop`."""
    found: list[tuple[Role, list[Node]]] = []
    takes_more = False
    for node in nodes:
        if node.kind == "nop":
            continue
        is_of_cpp = node.device == "cpu" and node.kind in ("pointwise", "reduction", "foreach")
        if takes_more and is_of_cpp:
            found[-1][1].append(node)
        elif node.kind not in _NOT_LAUNCHED:
            found.append((_ROLES.get(node.kind, Role.KERNEL), [node]))
        takes_more = is_of_cpp
    return found


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
    """Kernels that are launched, library calls and copies among them, and the bytes that they read and write.

    Bytes of collectives are not counted: what goes over the wire depends on the algorithm.
    """
    counted = [one for one in launched if one.role is not Role.WAIT]
    sizes = [one.bytes for one in counted if one.role is not Role.COLLECTIVE]
    return Totals(kernels=len(counted), bytes=sum(sizes))


def total_of(parts: Iterable[Totals]) -> Totals:
    """Kernels and bytes of several graphs."""
    every = list(parts)
    return Totals(kernels=sum(one.kernels for one in every), bytes=sum(one.bytes for one in every))


def total_before(decisions: Decisions) -> Totals:
    """Kernels and bytes if the scheduler had fused nothing."""
    nodes = [one for one in decisions.before if one.kind not in (*_NOT_LAUNCHED, "wait")]
    sizes = [one.bytes for one in nodes if one.kind != "collective"]
    return Totals(kernels=len(nodes), bytes=sum(sizes))


# Files

write = record_files.write
read = partial(record_files.read, Manifest, version=SCHEMA_VERSION, made_by="tpcompile fusion record")
"""Raises ConfigError for a file that is not there, is no manifest, or has a different schema version."""
