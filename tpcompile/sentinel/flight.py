"""torch's flight recorder and the main thread's stack -> collectives in flight and the user's lines, as records."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from tpcompile.evidence.collectives import is_library, is_library_file
from tpcompile.evidence.records import UserLine
from tpcompile.sentinel import adapter
from tpcompile.sentinel.messages import Issued, PointToPoint

_KEPT_PER_GROUP = 60
_PEER = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d+)")
_OP = re.compile(r"(?:\w+:)?(?P<op>\w+)")
_GENERATED_FILE = re.compile(r"torchinductor|^<|eval_with_key|in wrapped|codegen\(")
_GENERATED_FUNCTION = re.compile(r"in wrapped|codegen\(")
_STDLIB = sysconfig.get_paths()["stdlib"]
_BLOCKING = frozenset({"wait_tensor", "wait", "synchronize", "item", "barrier", "monitored_barrier", "redispatch"})


def issued_collectives(dump: Mapping[str, Any], *, now_ns: int) -> tuple[Issued, ...]:
    """The flight recorder's dump -> the last collectives of every group, oldest first."""
    by_group: dict[str, list[Issued]] = {}
    in_flight: set[str] = set()
    for entry in dump.get("entries", ()):
        if not entry.get("is_p2p"):
            found = _issued(entry, now_ns)
            if not found.is_done and found.group not in in_flight:
                in_flight.add(found.group)
                found = found.model_copy(update={"stack": _users(entry.get("frames", []))})
            by_group.setdefault(found.group, []).append(found)
    return tuple(found for group in by_group.values() for found in group[-_KEPT_PER_GROUP:])


def recorded(*, now_ns: int | None = None) -> tuple[Issued, ...]:
    """What this process issued, empty when no flight recorder runs (TORCH_FR_BUFFER_SIZE=0)."""
    return issued_collectives(adapter.recorded_collectives(), now_ns=now_ns or time.time_ns())


def point_to_point(frame: FrameType | None) -> PointToPoint | None:
    """The send or receive this process waits in: by the main thread's frame (gloo), or the recorder (NCCL)."""
    called = adapter.point_to_point(frame)
    if called is not None:
        stack = user_stack(frame)
        return PointToPoint(op=called[0], peer=called[1], line=stack[-1] if stack else None)
    if not is_blocked(frame):
        return None  # one in flight holds nobody up whose program goes on
    for entry in adapter.recorded_collectives().get("entries", ()):
        match = _PEER.search(str(entry.get("profiling_name", ""))) if entry.get("is_p2p") else None
        if match and not _is_done(entry):
            ranks = adapter.ranks_of_group(_group(entry))
            peer = int(match["peer"])
            line = _innermost(entry.get("frames", []))
            return PointToPoint(op=match["op"], peer=ranks[peer] if peer < len(ranks) else peer, line=line)
    return None


def _group(entry: Mapping[str, Any]) -> str:
    return " ".join(str(part) for part in entry.get("process_group", ()) if part)


def _is_done(entry: Mapping[str, Any]) -> bool:
    # gloo leaves the state at `scheduled` and retires what has ended; NCCL sets the state.
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _issued(entry: Mapping[str, Any], now_ns: int) -> Issued:
    name = str(entry.get("profiling_name", ""))
    match = _OP.match(name)
    return Issued(
        group=_group(entry),
        seq=int(entry.get("collective_seq_id", 0)),
        op=match["op"].lstrip("_") if match else name,
        sizes=_text(entry.get("input_sizes", [])),
        dtypes=",".join(entry.get("input_dtypes", [])),
        is_done=_is_done(entry),
        age_s=max(0.0, (now_ns - int(entry.get("time_created_ns", now_ns))) / 1e9),
        line=_innermost(entry.get("frames", [])),
    )


def _text(sizes: Iterable[Iterable[int]]) -> str:
    return " ".join("x".join(map(str, size)) or "scalar" for size in sizes)


def _innermost(frames: Iterable[Mapping[str, Any]]) -> UserLine | None:
    """First frame, innermost first, that the user wrote."""
    return next(iter(_users(frames)), None)


def _users(frames: Iterable[Mapping[str, Any]]) -> tuple[UserLine, ...]:
    """Frames that the user wrote, innermost first."""
    lines = (user_line(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames)
    return tuple(line for line in lines if line is not None)


def user_line(filename: str, lineno: int, function: str) -> UserLine | None:
    """The line, None when torch, tpcompile or generated code owns it."""
    if adapter.is_torch(filename) or _is_generated(filename) or _GENERATED_FUNCTION.search(function):
        return None
    if filename.startswith(_STDLIB) and "site-packages" not in filename:
        return None
    line = UserLine(file=filename, line=lineno, function=function, code=linecache.getline(filename, lineno).strip())
    if is_library(line) or "/tpcompile/sentinel/" in filename:
        return None
    return line


def _is_generated(filename: str) -> bool:
    # A cache that the user placed need not have torchinductor in its name.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "").rstrip("/")
    return bool(_GENERATED_FILE.search(filename)) or bool(cache and filename.startswith(f"{cache}/"))


def user_stack(frame: FrameType | None) -> tuple[UserLine, ...]:
    """The user's frames of a thread, outermost first, from its innermost Python frame."""
    found = []
    while frame is not None:
        line = user_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if line is not None:
            found.append(line)
        frame = frame.f_back
    return tuple(reversed(found))


def is_blocked(frame: FrameType | None) -> bool:
    """True when a thread's innermost frames are in torch's own code for communication or for waiting."""
    for _ in range(4):
        if (
            frame is not None
            and is_library_file(frame.f_code.co_filename)
            and "/tpcompile/" in frame.f_code.co_filename
        ):
            return True  # one of our own collectives
        if frame is None or not adapter.is_torch(frame.f_code.co_filename):
            return False
        inside = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py")
        if frame.f_code.co_name in _BLOCKING or frame.f_code.co_filename.endswith(inside):
            return True
        frame = frame.f_back
    return False
