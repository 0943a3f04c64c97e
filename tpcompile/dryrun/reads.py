"""The calls of this process while it is watched -> the lines outside of torch that may have learned where the rank is.

Until a program has learned its rank, it is the same program on every rank: a branch on `rank == 37` reads the rank on
all of them, so one rank that is watched says whether the others can differ. What a rank is given is known: variables,
the context, process groups, meshes. From there it reaches the program through torch.distributed, so a call of it that
is not known to answer alike on all ranks counts, and so does what leaves Python. torch's own reads are left out, but
for a shard of uneven size.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from tpcompile.dryrun import tripwires
from tpcompile.evidence.records import RankDigest, TaintKind, UserLine
from tpcompile.evidence.text.lines import installed_in, is_library_file, line_of_frame
from tpcompile.target import WatchedContext

_DISTRIBUTED = re.compile(r"/torch/distributed/")
_ALIKE_FILES = re.compile(
    r"/torch/distributed/"
    r"(?:_composable|algorithms|fsdp|nn|_functional_collectives|tensor/(?:parallel|_api|_ops|_dispatch|placement_types))"
)
"""Files whose functions take and give tensors and modules."""
_ALIKE = frozenset({
    "WORLD", "destroy_process_group", "get_backend", "get_world_size", "init_process_group", "is_available",
    "is_backend_available", "is_gloo_available", "is_initialized", "is_nccl_available",
    "_coalescing_manager", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "monitored_barrier", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
    "__enter__", "__eq__", "__exit__", "__getitem__", "__hash__", "__init__", "_flatten", "_unflatten", "device_type",
    "get_all_groups", "get_group", "init_device_mesh", "manual_seed", "mesh_dim_names", "ndim", "shape", "size",
    "inner", "wrapper",
})  # fmt: skip
"""Functions of torch.distributed that answer alike on all ranks, or on all of a group."""
_NOT_ALIKE = frozenset({"DeviceMesh.__init__"})
"""Ranks that are in no group of a mesh of the program's own are known by that."""
_PASSES_ON = re.compile(r"/torch/(?:utils/data|distributed/(?:checkpoint|elastic|launcher|optim|rpc))/")
"""Parts of torch that read the rank for the program."""
_WRAPPERS = re.compile(r"/torch/distributed/c10d_logger\.py$|/torch/utils/_contextlib\.py$")
_VARIABLES = re.compile(r"(?:\w+_)?RANK|\w*PROCID|\w*LOCALID|\w*NODEID|CUDA_VISIBLE_DEVICES")
_FOLDING = re.compile(r"/torch/_dynamo/variables/")
"""Dynamo calls such a function where the code that it traces does; elsewhere it asks for itself which GPU there is."""
_OUT_OF_PYTHON = re.compile(r"subprocess\.Popen|os\.(?:system|exec|posix_spawn|fork)|ctypes\.(?:dlopen|dlsym)")
"""Audit events of the standard library."""


def _codes(functions: Iterable[Any]) -> dict[int, CodeType]:
    """Code objects by their id: those that Dynamo makes may have no hash."""
    plain = [inspect.unwrap(function) for function in functions if callable(function)]
    codes = [function.__code__ for function in plain if hasattr(function, "__code__")]
    return {id(code): code for code in codes}


_READERS = tripwires.CODES | _codes([
    dist.get_rank, dist.get_node_local_rank, dist.get_group_rank, dist.get_process_group_ranks,
    torch.cuda.current_device, torch.accelerator.current_device_index,
])  # fmt: skip
_CONTEXT = WatchedContext.__getattribute__.__code__
_SHARDS = _codes([Shard.local_shard_size_and_offset, Shard._split_tensor, vars(Shard).get("_select_split_tensor")])
_OWN = os.path.dirname(__file__) + "/"
_STDLIB = (os.path.dirname(os.__file__) + "/", "<")
"""What is generated has no file: the `__init__` of a dataclass."""
_IN_ENVIRONMENT = type(os.environ).__getitem__.__code__


@contextmanager
def watched_reads() -> Iterator[dict[UserLine, None]]:
    """Yield the lines, each once, in the order of their first read. Dynamo costs three times as much meanwhile.

    For a process that ends soon after: an audit hook stays.
    """
    lines: dict[UserLine, None] = {}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and _may_tell(frame):
            _note(frame, frame.f_back, lines)
        elif event == "c_call" and argument in (os.getpid, os.getppid):
            _note_of_process(frame, lines)

    def audited(event: str, arguments: tuple[Any, ...]) -> None:
        is_of_process = event == "open" and str(arguments[0]).startswith("/proc/")
        if sys.getprofile() is seen and (is_of_process or _OUT_OF_PYTHON.fullmatch(event)):
            _note_of_process(sys._getframe(1), lines)

    outer = sys.getprofile()
    with tripwires.laid():
        sys.addaudithook(audited)
        threading.setprofile(seen)
        sys.setprofile(seen)
        try:
            yield lines
        finally:
            if sys.getprofile() is not seen:  # a profiler of the program's own: from then on nothing was seen
                lines[UserLine(file="<sys.setprofile>", line=0)] = None
            sys.setprofile(outer)
            threading.setprofile(None)


def _may_tell(frame: FrameType) -> bool:
    """True where the call may tell its caller the rank."""
    code = frame.f_code
    if code is _CONTEXT:
        return frame.f_locals.get("name") in ("rank", "__dict__")
    if code is _IN_ENVIRONMENT:
        key = frame.f_locals.get("key")
        return _VARIABLES.fullmatch(os.fsdecode(key) if isinstance(key, bytes) else str(key)) is not None
    if id(code) in _SHARDS:
        return _is_uneven(frame.f_locals)
    return id(code) in _READERS or _is_of_distributed(code.co_filename, code.co_name, code.co_qualname)


def _is_uneven(given: dict[str, Any]) -> bool:
    size, chunks = given.get("curr_local_size"), given.get("num_chunks")
    if size is None:
        size = given["tensor"].shape[given["dim"] if "dim" in given else given["self"].dim]
    return isinstance(size, int) and isinstance(chunks, int) and size % chunks != 0


@cache
def _is_of_distributed(file: str, name: str, qualified: str) -> bool:
    """True for a function of torch.distributed that is not known to answer alike on all ranks."""
    if _DISTRIBUTED.search(file) is None:
        return False
    is_inner = name.startswith("<") or _ALIKE_FILES.search(file) is not None
    return qualified in _NOT_ALIKE or not (is_inner or name in _ALIKE)


def _note(called: FrameType, caller: FrameType | None, lines: dict[UserLine, None]) -> None:
    """Keep the line that is told, where it is none of torch's."""
    is_shard = id(called.f_code) in _SHARDS
    frame = _users(caller) if is_shard else _past_wrappers(caller)
    if frame is None or frame.f_code.co_filename.startswith(_OWN):
        return
    file = frame.f_code.co_filename
    # Dynamo asks a mesh for the coordinate as it traces DTensor; `traced_reads` has what the program asks there.
    is_of_mesh = id(called.f_code) in tripwires.OF_MESH
    is_folded = _FOLDING.search(file) is not None and id(called.f_code) in _READERS and not is_of_mesh
    if _PASSES_ON.search(file):
        frame = _users(frame)
    if frame is not None and (is_folded or not is_library_file(frame.f_code.co_filename)):
        lines[line_of_frame(frame)] = None


def _past_wrappers(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_STDLIB) and _WRAPPERS.search(file) is None:
            break
        frame = frame.f_back  # os.getenv, Mapping.get; torch's decorators
    return frame


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _note_of_process(frame: FrameType, lines: dict[UserLine, None]) -> None:
    """Keep the line of the program's own that asks the operating system; installed packages do so for other reasons."""
    found = _past_wrappers(frame)
    if found is None:
        return
    file = found.f_code.co_filename
    if not (is_library_file(file) or installed_in(file) or file.startswith(_OWN)):
        lines[line_of_frame(found)] = None


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
