"""torch's flight recorder and the main thread's stack -> collectives in flight and the user's lines, as records."""

from __future__ import annotations

import bisect
import functools
import linecache
import os
import re
import sysconfig
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice, takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from tpcompile.evidence.iterables import first, grouped, last
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.text.lines import is_library, is_library_file, of_program
from tpcompile.evidence.timeline.flow import Code
from tpcompile.sentinel.messages import Issued, Message, PointToPoint
from tpcompile.torch_api import watching
from tpcompile.torch_api.point_to_point import Posted

_KEPT_PER_GROUP = 120
_PACKAGE = str(Path(__file__).parents[1])
_CALLERS = f"{_PACKAGE}/numerics/"
"""A package that calls a program: not the user's, beside those that `is_library` knows."""
Begun = tuple[int, str, int]
"""(Unix time in ns, region, call)."""
_PEER = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d+)")
_OP = re.compile(r"(?:\w+:)?(?P<op>\w+)")
_GENERATED_FILE = re.compile(r"torchinductor|^<|eval_with_key|in wrapped|codegen\(")
_GENERATED_FUNCTION = re.compile(r"in wrapped|codegen\(")
_STDLIB = sysconfig.get_paths()["stdlib"]
_BLOCKING_FILES = ("distributed_c10d.py", "_functional_collectives.py", "c10d_logger.py")
_BLOCKING = frozenset({"wait_tensor", "wait", "synchronize", "item", "barrier", "monitored_barrier", "redispatch"})


def recorded(*, begun: Sequence[Begun] = ()) -> tuple[Issued, ...]:
    """The last collectives of every group that this process issued, oldest first.

    Empty without a flight recorder (TORCH_FR_BUFFER_SIZE=0). `begun` are the calls of compiled regions; a collective
    issued in one carries its number.
    """
    entries = watching.recorded_collectives().get("entries", ())
    now_ns = time.time_ns()
    by_group = grouped((entry for entry in entries if not entry.get("is_p2p")), _group)
    newest = (alike[-_KEPT_PER_GROUP:] for alike in by_group.values())
    return tuple(_issued(entry, now_ns, begun) for entry in chain.from_iterable(newest))


def issuing_places(issued: Iterable[Issued], sent: Iterable[Message] = ()) -> tuple[Code, ...]:
    """Lines that issued a collective or a message, as far as they are remembered.

    For compiled code the region, with an empty file.
    """
    issued = tuple(issued)
    stacks = [one.stack[::-1] for one in issued if not one.region] + [one.stack for one in sent]
    # a package may wrap torch's function; what it executes is not recorded
    lines = known(of_program(stack) or last(stack) for stack in stacks)
    found = [Code(file="", function=one.region, line=0) for one in issued if one.region]
    found += [Code(file=line.file, function="", line=line.line) for line in lines]
    return tuple(dict.fromkeys(found))


def messages(posted: Sequence[Posted], waits_in: PointToPoint | None = None) -> tuple[Message, ...]:
    """What this process has posted, as records; oldest first. `waits_in` is the one that it waits in."""
    now_ns = time.time_ns()
    held = None
    if waits_in is not None:
        waited = (waits_in.op, waits_in.peer, waits_in.number)
        held = first(one for one in posted if (one.op, one.peer, one.number) == waited)
    return tuple(
        Message(
            op=one.op,
            peer=one.peer,
            number=one.number,
            tag=one.tag,
            number_of_tag=one.number_of_tag,
            content={"elements": str(one.num_elements), "dtypes": one.dtypes},
            age_s=max(0.0, (now_ns - one.at_ns) / 1e9),
            stack=_posted_at(one),
            is_queued=held is not None and _is_queued(one, held),
        )
        for one in posted
    )


def _is_queued(posted: Posted, held: Posted) -> bool:
    """True for a message on the stream of the one that is `held`, and behind it."""
    if not (posted.is_on_gpu and held.is_on_gpu) or posted.peer != held.peer or posted.at_ns <= held.at_ns:
        return False
    return not (held.is_in_batch and posted.stack == held.stack)


def _posted_at(posted: Posted) -> tuple[UserLine, ...]:
    """The user's frames of a message, outermost first."""
    lines = known(user_line(code.co_filename, line, code.co_name) for code, line in posted.stack)
    return tuple(reversed(lines))


def point_to_point(
    frame: FrameType | None, posted: Iterable[Posted] = (), *, is_held: bool = False
) -> PointToPoint | None:
    """The send or receive this process waits in; none while its main thread is not held, and goes on meanwhile.

    Of gloo what the main thread has posted and waits for, or has called; of NCCL what the recorder has in flight.
    """
    called = watching.point_to_point(frame)
    waited = [one for one in posted if not one.has_ended]
    if called is not None:
        message = first(one for one in waited if (one.op, one.peer) == called)
        return _waited(message, op=called[0], peer=called[1], line=last(user_stack(frame)))
    if not is_held:
        return None
    if waited and watching.waits_for_work(frame):
        # `dist.irecv(x, 0).wait()`: sends that nobody has waited for yet may be older
        here = last(user_stack(frame))
        one = last([one for one in waited if here is not None and last(_posted_at(one)) == here]) or waited[0]
        return _waited(one, op=one.op, peer=one.peer, line=last(_posted_at(one)))
    entries = watching.recorded_collectives().get("entries", ())
    in_flight = list(filter(None, map(_p2p_in_flight, entries)))
    return _numbered(in_flight, posted) if in_flight else None


def _waited(posted: Posted | None, **fields: Any) -> PointToPoint:
    """What this process waits in, with the numbers of the message where it was recorded."""
    if posted is not None:
        fields |= {"number": posted.number, "tag": posted.tag, "number_of_tag": posted.number_of_tag}
    return PointToPoint(**fields)


def has_message_in_flight(*, for_s: float) -> bool:
    """True for a send or receive that NCCL's recorder has had in flight for more than `for_s`."""
    now_ns = time.time_ns()
    messages = filter(_p2p_in_flight, watching.recorded_collectives().get("entries", ()))
    return any(now_ns - entry.get("time_created_ns", now_ns) > for_s * 1e9 for entry in messages)


def _numbered(in_flight: Sequence[PointToPoint], posted: Iterable[Posted]) -> PointToPoint:
    """The first one with its number, counted back from the last one that was posted."""
    oldest = in_flight[0]
    numbers = [one.number for one in posted if (one.op, one.peer) == (oldest.op, oldest.peer)]
    num_in_flight = sum((one.op, one.peer) == (oldest.op, oldest.peer) for one in in_flight)
    number = max(numbers, default=0) - num_in_flight + 1
    return oldest.model_copy(update={"number": max(0, number) if numbers else 0})


def _p2p_in_flight(entry: Mapping[str, Any]) -> PointToPoint | None:
    if not entry.get("is_p2p") or _is_done(entry):
        return None
    match = _PEER.search(str(entry.get("profiling_name", "")))
    if match is None:
        return None
    peer = int(match["peer"])
    ranks = watching.group_members().get(_group(entry), ())
    line = first(_users(entry.get("frames", [])))
    return PointToPoint(op=match["op"], peer=ranks[peer] if peer < len(ranks) else peer, line=line)


def _group(entry: Mapping[str, Any]) -> str:
    return " ".join(str(part) for part in entry.get("process_group", ()) if part)


def _is_done(entry: Mapping[str, Any]) -> bool:
    # gloo leaves the state at `scheduled` and retires what has ended; NCCL sets the state.
    return bool(entry.get("retired")) or entry.get("state") == "completed"


def _issued(entry: Mapping[str, Any], now_ns: int, begun: Sequence[Begun]) -> Issued:
    name = str(entry.get("profiling_name", ""))
    match = _OP.match(name)
    frames = entry.get("frames", [])
    stack = _users(frames)
    created_ns = int(entry.get("time_created_ns", now_ns))
    entries = [watching.is_compiled_call(frame["name"], frame["filename"]) for frame in frames]
    depths = [depth for depth, is_entry in enumerate(entries) if is_entry]
    # The user's line that called the compiled code in which the innermost of the frames runs.
    call_line = first(_users(frames[depths[-1] + 1 :])) if depths else None
    num_before = bisect.bisect(begun, created_ns, key=lambda one: one[0]) if call_line else 0
    region, call = begun[num_before - 1][1:] if num_before else ("", 0)
    sizes = ("x".join(map(str, size)) or "scalar" for size in entry.get("input_sizes", []))
    return Issued(
        group=_group(entry),
        seq=int(entry.get("collective_seq_id", 0)),
        op=match["op"].lstrip("_") if match else name,
        sizes=" ".join(sizes),
        dtypes=",".join(entry.get("input_dtypes", [])),
        is_done=_is_done(entry),
        age_s=max(0.0, (now_ns - created_ns) / 1e9),
        stack=stack,
        call_line=call_line,
        region=region,
        call=call,
    )


def _users(frames: Iterable[Mapping[str, Any]]) -> tuple[UserLine, ...]:
    """Frames of the user's code, innermost first."""
    return tuple(known(user_line(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames))


@functools.lru_cache(maxsize=4096)
def user_line(filename: str, lineno: int, function: str) -> UserLine | None:
    """The line of user code; None for torch, tpcompile, libraries and generated code."""
    if _GENERATED_FUNCTION.search(function) or watching.is_torch(filename) or is_generated(filename):
        return None
    if filename.startswith(_CALLERS) or (filename.startswith(_STDLIB) and "site-packages" not in filename):
        return None
    line = UserLine(file=filename, line=lineno, function=function, code=linecache.getline(filename, lineno).strip())
    return None if is_library(line) else line


def is_generated(filename: str) -> bool:
    """True for a file of code that torch generated."""
    # A cache that the user placed need not have torchinductor in its name.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "").rstrip("/")
    return bool(_GENERATED_FILE.search(filename)) or bool(cache and filename.startswith(f"{cache}/"))


def user_stack(frame: FrameType | None) -> tuple[UserLine, ...]:
    """The user's frames of a thread, outermost first, from its innermost Python frame."""
    placed = ((one.f_code, one.f_lineno) for one in watching.frames_from(frame))
    # Between two instructions a frame of a different thread may have no line, although its annotation is `int`.
    lines = (user_line(code.co_filename, line or code.co_firstlineno, code.co_name) for code, line in placed)
    return tuple(reversed(known(lines)))


def is_blocked(frame: FrameType | None) -> bool:
    """True when a thread waits for what it has issued, or is in torch's own code for communication or for waiting."""
    if watching.waits_for_work(frame):
        return True
    innermost = islice(watching.frames_from(frame), 4)
    within = takewhile(lambda one: watching.is_torch(one.f_code.co_filename) or _is_own_collective(one), innermost)
    return any(map(_waits, within))


def _waits(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_name in _BLOCKING or code.co_filename.endswith(_BLOCKING_FILES) or _is_own_collective(frame)


def _is_own_collective(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(f"{_PACKAGE}/") and is_library_file(file)
