"""The calls of this process while it is watched -> the lines outside of torch that learned where the rank is.

Until a program reads its rank, it is the same program on every rank. A branch on `rank == 37` reads the rank on all of
them, so one rank that is watched says whether the others can differ. torch's own reads are left out: DTensor computes
the size and the offset of a shard of its coordinate.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.evidence.records import RankDigest, TaintKind, UserLine
from tpcompile.evidence.text.lines import is_library_file, line_of_frame
from tpcompile.target import WatchedContext

_FUNCTIONS = (
    dist.get_rank, dist.get_node_local_rank, dist.get_group_rank, dist.get_process_group_ranks,
    torch.cuda.current_device,
)  # fmt: skip
_MESH = vars(DeviceMesh)
_OF_MESH = (*map(_MESH.get, ("get_rank", "get_local_rank", "get_coordinate")), getattr(_MESH.get("mesh"), "fget", None))
_IN_C = frozenset({"rank", "getRank"})
"""Methods of process groups."""
_VARIABLES = re.compile(r"(?:\w+_)?RANK|\w*PROCID|\w*LOCALID|NODE_RANK|CUDA_VISIBLE_DEVICES")
_FOLDING = re.compile(r"/torch/_dynamo/")
"""Dynamo calls such a function where the code that it traces does."""


def _codes(functions: Iterable[Any]) -> frozenset[CodeType]:
    return frozenset(function.__code__ for function in functions if hasattr(function, "__code__"))


_READERS, _MESH_READERS = _codes(_FUNCTIONS), _codes(_OF_MESH)
_CONTEXT = WatchedContext.__getattribute__.__code__
_ENVIRONMENT = type(os.environ).__getitem__.__code__


@contextmanager
def watched_reads() -> Iterator[dict[UserLine, None]]:
    """Yield the lines, each once, in the order of their first read. Dynamo costs three times as much meanwhile."""
    lines: dict[UserLine, None] = {}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            reader: FrameType | None = frame.f_back if _is_reader(frame) else None
        else:
            reader = frame if event == "c_call" and _is_method(argument) else None
        if reader is not None:
            _note(reader, lines)

    outer = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield lines
    finally:
        sys.setprofile(outer)


def _is_reader(frame: FrameType) -> bool:
    code = frame.f_code
    if code is _CONTEXT:
        return frame.f_locals.get("name") == "rank"
    if code is _ENVIRONMENT:
        return _VARIABLES.fullmatch(str(frame.f_locals.get("key"))) is not None
    # Dynamo asks a mesh for the coordinate as it traces DTensor; what a user's traced code asks, `traced_reads` has.
    is_dynamos = frame.f_back is not None and _FOLDING.search(frame.f_back.f_code.co_filename)
    return code in _READERS or (code in _MESH_READERS and not is_dynamos)


def _is_method(called: Any) -> bool:
    """True for a method of a process group that says the rank: functions of pybind belong to a capsule."""
    return called.__name__ in _IN_C and type(getattr(called, "__self__", None)).__name__ == "PyCapsule"


def _note(reader: FrameType, lines: dict[UserLine, None]) -> None:
    frame: FrameType | None = reader
    while frame is not None and frame.f_code.co_filename.startswith(_STDLIB):
        frame = frame.f_back  # os.getenv, Mapping.get
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return
    file = frame.f_code.co_filename
    if not is_library_file(file) or _FOLDING.search(file):
        lines[line_of_frame(frame)] = None


_OWN = os.path.dirname(__file__) + "/"
_STDLIB = (os.path.dirname(os.__file__) + "/", "<frozen ")


_OF_MACHINE = (TaintKind.HOSTNAME, TaintKind.PID)
"""All ranks of a dry run are on one machine, with the same variables but for those of a rank."""


def traced_reads(digest: RankDigest) -> dict[UserLine, None]:
    """Lines of traced code that read the rank: Dynamo need not call what they call."""
    lines: dict[UserLine, None] = {}
    for read in digest.rank_sources("read"):
        is_other = read.kind in _OF_MACHINE or (read.variable and not _VARIABLES.fullmatch(read.variable))
        if read.line is not None and not is_other:
            lines[read.line] = None
    return lines
