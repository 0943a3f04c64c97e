"""One compile of one rank -> its reads of the rank and its guards on values with a rank's name, for the digest.

Whether the values differ between ranks is decided in `taint`, which has the digests of all ranks.
"""

from __future__ import annotations

import re

from tpcompile.evidence.records import CompileRecord, Guard, RankRead, TaintKind
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.text.guards import parts_of

VALUE_GUARDS = frozenset({
    "EQUALS_MATCH", "CONSTANT_MATCH", "TRUE_MATCH", "FALSE_MATCH", "LAMBDA_GUARD", "SHAPE_ENV", "SYMBOLIC_SHAPE_GUARD",
    "RELATIONAL_GUARD",
})  # fmt: skip
"""Guards on a Python number, string or flag; all other types are about a tensor, an object or a container."""

_SEGMENT = re.compile(r"\['([^']*)'\]|\[b'([^']*)'\]|\.(\w+)")
_NAMES = (
    (re.compile(r"^(?:node_)?local_rank$|_local_rank$", re.I), TaintKind.LOCAL_RANK),
    (re.compile(r"^(?:tp|sp|cp|ep|pp|dp|mp|ddp|fsdp|group|mesh|tensor_parallel|sequence_parallel)_?rank$|^coordinate$",
                re.I), TaintKind.GROUP_RANK),
    (re.compile(r"^(?:my_?|global_|world_|process_|ddp_|dist_)?rank(?:_id)?$|^is_rank_?(?:0|zero)$|^rank_zero$"
                r"|^is_(?:main|master|first|last)_(?:process|rank)$", re.I), TaintKind.RANK),
    (re.compile(r"^(?:cuda_|gpu_)?device_(?:index|id)$|^gpu_id$", re.I), TaintKind.DEVICE_INDEX),
    (re.compile(r"^host_?name$|^nodename$", re.I), TaintKind.HOSTNAME),
    (re.compile(r"^pid$|^process_id$", re.I), TaintKind.PID),
)  # fmt: skip
_CONDITIONAL = re.compile(r"\b(?:if|and|or|else|lambda)\b")
_GROUP_OBJECT = re.compile(r"ProcessGroup|DeviceMesh")


def rank_sources(compile_: CompileRecord, where: str) -> tuple[RankRead, ...]:
    """Reads of the rank in traced code, marked sure where graph or guards confirm them, and guards on values named
    like a rank."""
    found: list[RankRead] = []
    for read in compile_.rank_reads or ():
        receiver = "" if _is_group(read, compile_) else read.receiver
        is_sure = read.is_sure or _is_traced(read, compile_)
        found.append(read.changed(where=where, is_sure=is_sure, receiver=receiver))
    for guard in compile_.guards:
        kind = kind_of_name(guard)
        if kind is not None:
            value = parts_of(guard).get("value", "")
            found.append(
                RankRead(what="guard", kind=kind, text=guard.expression, line=guard.line, value=value, where=where)
            )
    return tuple(found)


def kind_of_name(guard: Guard) -> TaintKind | None:
    """Which number of a rank the last name in a guard's source denotes; None for a guard on no Python value."""
    # Environment variables are compared by their values, not by name.
    is_variable = "environ" in guard.source
    if is_variable or guard.type not in VALUE_GUARDS:
        return None
    names = ["", *map("".join, _SEGMENT.findall(guard.source))]
    if names[-2:] == ["device", "index"]:
        return TaintKind.DEVICE_INDEX
    for pattern, kind in _NAMES:
        if pattern.search(names[-1]):
            return kind
    return None


def _is_traced(read: RankRead, compile_: CompileRecord) -> bool:
    """True when a node or guard of this compile is on that line; a guard has only the end of the file's path.

    That a line with a conditional part was traced does not show that the read was.
    """
    at = read.line
    if at is None:
        return False
    is_whole = _CONDITIONAL.search(at.code) is None
    traced = lines_of([*compile_.dynamo_nodes, *compile_.guards])
    files = [line.file for line in traced if line.line == at.line]
    return is_whole and any(map(at.file.endswith, files))


def _is_group(read: RankRead, compile_: CompileRecord) -> bool:
    """True when a guard shows the receiver (`self.group` is `L['self'].group`) to be a process group or mesh."""
    names = read.receiver.split(".")
    local = ".".join([f"L['{names[0]}']", *names[1:]])
    sources = local, local.replace("L", "G", 1)
    return any(g.source in sources and _GROUP_OBJECT.search(g.expression) for g in compile_.guards)
