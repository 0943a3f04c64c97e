"""Every name of torch that is private or moves and that the sentinel needs; seen on torch 2.11.0 and 2.13.0.

    name                                          why
    eval_frame.compile_wrapper (its code object)  the frame through which every call of a compiled callable goes
    OptimizeContext.enter_exit_hooks              called before and after every call of a compiled callable
    _C._cuda_hasPrimaryContext                    which GPUs this process has used
    _debug_get_cache_entry_list, compile_id       which of the compiled variants of a function was hit
    ProcessGroup._get_sequence_number_for_group   number of the last collective of a group
    torch._C._distributed_c10d._dump_fr_trace     flight recorder: collectives in flight with the user's frames
    Module._call_impl (code objects)              the frames through which a module is called, with hooks and without
    Module._compiled_call_impl                    where `module.compile()` keeps the compiled call
    _dynamo.exc.TorchDynamoException              base of every error the compiler raises, Inductor's included
    convert_frame.output_codes                    code that Dynamo has made of a frame
    resume_execution.TORCH_DYNAMO_RESUME_IN_PREFIX    names of the code with which a frame goes on after a graph break

`tests/torch_api/test_watching.py` fails when torch moves one of them.
"""

from __future__ import annotations

import dis
import functools
import inspect
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import dropwhile, islice, takewhile
from traceback import FrameSummary
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo.config
import torch.distributed as dist
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo import eval_frame as _eval_frame
from torch._dynamo import exc as _exc
from torch._dynamo.convert_frame import output_codes as _output_codes
from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX as _RESUMED
from torch.nn.modules import module as _module

from tpcompile.evidence.digests.split_regions import skipped_frame
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import SkippedFrame, UserLine
from tpcompile.torch_api import c10d
from tpcompile.torch_api import compiler as compat

COMPILE_WRAPPER = compat.COMPILE_WRAPPER
_CALL, _WRAPPED_CALL = _module.Module._call_impl.__code__, _module.Module._wrapped_call_impl.__code__
_HOOKED_CALL = next((const for const in _CALL.co_consts if isinstance(const, CodeType)), None)
"""The function in `_call_impl` that calls a module with hooks, as FSDP's are."""
_DYNAMO = _eval_frame.__file__.rpartition("/")[0]
TORCH = torch.__file__.rpartition("/")[0]
_PACKAGE = __file__.rpartition("/torch_api/")[0]
_WRAPPERS = f"{_PACKAGE}/collectives/"
_PEERS = {inspect.unwrap(dist.send).__code__: "dst", inspect.unwrap(dist.recv).__code__: "src"}
"""Functions of torch that wait for a peer -> their argument for it."""
_HERE = tuple(f"{_PACKAGE}/{name}/" for name in ("sentinel", "recording", "torch_api"))
"""Folders of ours whose frames are between Dynamo and the program."""
_BETWEEN = ("contextlib.py", "_utils_internal.py", "/logging/__init__.py", "/torch/_logging/_internal.py")  # fmt: skip
"""Files of frames between a callback or log handler of ours and Dynamo."""
_LOADED_BEFORE = 6
"""Instructions before a call within which its function was loaded: what is between them loads the arguments."""


def is_made_by_dynamo(code: CodeType) -> bool:
    """True for a compiled frame, and for the rest of it after a graph break: they have the lines of the user's code."""
    return code.co_name.startswith(_RESUMED) or code in _output_codes


def frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those that called it, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Entered(NamedTuple):
    """A call of a compiled callable."""

    target: Any
    """What the user compiled: a function, or the module whose call this is."""
    wrapper: FrameType
    """Frame of the callable itself."""

    @property
    def function(self) -> Any:
        """What torch runs compiled: one object for all calls of the callable."""
        return self.wrapper.f_locals["fn"]

    @property
    def context(self) -> Any:
        """The object of torch that made the callable."""
        return self.wrapper.f_locals["self"]


def entered(frame: FrameType | None) -> Entered | None:
    """The compiled callable whose own frame is looked up or compiled below `frame`; None for a frame further in.

    A module's call goes through `_call_impl`; then the module is the target. Frames of Dynamo itself are skipped.
    """
    module = None
    for caller in dropwhile(_is_machinery, frames_from(frame)):
        if _is_module_call(caller.f_code):
            module = caller.f_locals.get("self")
        elif caller.f_code is COMPILE_WRAPPER:
            target = caller.f_locals.get("fn") if module is None else module
            return Entered(target, caller)
        else:
            return None
    return None


def entry_hooks(context: Any) -> list[Callable[[], Any]]:
    """What that object calls before every call, and what each of them returns after it; to be changed in place."""
    hooks: list[Callable[[], Any]] = context.enter_exit_hooks
    return hooks


def num_variants(code: CodeType) -> int:
    """Compiled variants of a function."""
    return len(_debug_get_cache_entry_list(code))


def variant_hit(code: CodeType) -> str:
    """Compile id of the variant whose guards held last: torch moves it to the front of its list."""
    entries = _debug_get_cache_entry_list(code)
    return str(entries[0].compile_id) if entries else ""


def skipped_code(frame: FrameType) -> SkippedFrame | None:
    """The code of a frame that runs in Python, where Dynamo skips it; None where it is compiled up to a graph break."""
    code = frame.f_code
    at = UserLine(file=code.co_filename, line=frame.f_lineno, function=code.co_name)
    failed = skipped_frame(at, compat.failed_frames())
    if failed is not None or num_variants(code):
        return failed
    return SkippedFrame(line=at, reason="")


def is_compiled_call(function: str, filename: str) -> bool:
    """True for the frame through which a call of a compiled callable goes, as a recorded stack writes it."""
    return function == COMPILE_WRAPPER.co_name and filename == COMPILE_WRAPPER.co_filename


def is_in_dynamo(frame: FrameType | None) -> bool:
    """True when Dynamo is compiling on the thread whose innermost frame this is."""
    codes = (caller.f_code for caller in frames_from(frame))
    return any(code.co_name == "_compile" and code.co_filename.startswith(_DYNAMO) for code in codes)


def uses_gpu() -> bool:
    """True once this process has used a GPU."""
    return bool(torch.cuda.is_initialized())


def has_gpu_work() -> bool:
    """True while a default stream of this process has work that is not done.

    Ask only of a main thread that does not move: a stream must not be asked while a CUDA graph is captured.
    """
    if not torch.cuda.is_initialized():
        return False
    used = filter(torch._C._cuda_hasPrimaryContext, range(torch.cuda.device_count()))
    return any(not torch.cuda.default_stream(device).query() for device in used)


def finish_device_work() -> None:
    """Wait for what this process has queued on its GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_of_compiler(error: BaseException) -> bool:
    """True for an exception that a compile raised."""
    return isinstance(error, _exc.TorchDynamoException)


def traced_stack(error: BaseException) -> list[FrameSummary]:
    """The traced program where the compiler raised, outermost first; empty for an error of a different kind."""
    return list(getattr(error, "real_stack", None) or ()) if is_of_compiler(error) else []


def swallows_errors() -> bool:
    """True when the compiler runs a frame eagerly where it failed, and raises nothing."""
    return bool(torch._dynamo.config.suppress_errors)


def is_torch(filename: str) -> bool:
    """True for a file of torch itself."""
    return filename.startswith(TORCH)


def _is_module_call(code: CodeType) -> bool:
    # By identity: the hash of a code object costs a microsecond.
    return code is _CALL or code is _WRAPPED_CALL or code is _HOOKED_CALL


def _is_machinery(frame: FrameType) -> bool:
    code = frame.f_code
    if code is COMPILE_WRAPPER or _is_module_call(code):
        return False
    return code.co_filename.startswith((_DYNAMO, *_HERE)) or code.co_filename.endswith(_BETWEEN)


def recorded_collectives() -> dict[str, Any]:
    """The flight recorders' dump: `entries`, those of a backend oldest first, and `pg_status`; `{}` without any."""
    recorders = [torch._C._distributed_c10d._dump_fr_trace]
    # NCCL has a recorder of its own, beside that of the other backends.
    if torch.cuda.is_available() and hasattr(torch._C._distributed_c10d, "_dump_nccl_trace"):
        recorders.insert(0, torch._C._distributed_c10d._dump_nccl_trace)
    dumps = [pickle.loads(recorder()) for recorder in recorders]  # from our own process, not from the network
    found: dict[str, Any] = {}
    entries: list[Any] = []
    for dump in dumps:
        found.update(dump)
        entries += dump.get("entries", ())
    return {**found, "entries": entries} if entries else {}


class _Group(NamedTuple):
    """A process group of this rank."""

    handle: dist.ProcessGroup
    name: str
    label: str
    """`name description`, as the flight recorder writes it."""
    ranks: tuple[int, ...]
    """Global ranks."""


def _groups() -> list[_Group]:
    found = []
    for handle, name in c10d.known_groups():
        ranks = tuple(dist.get_process_group_ranks(handle))
        found.append(_Group(handle, name, f"{name} {handle.group_desc}", ranks))
    return found


def group_members() -> dict[str, tuple[int, ...]]:
    """`name description` of every process group of this rank, as the flight recorder writes it -> its global ranks."""
    return {group.label: group.ranks for group in _groups()}


def collective_numbers(members: Sequence[int]) -> dict[str, int]:
    """`name description` of every group that all of `members` are in -> number of its last collective on this rank."""
    shared = [group for group in _groups() if set(members).issubset(group.ranks)]
    found = {}
    for group in shared:
        with suppress(RuntimeError):  # a third-party backend need not count collectives
            found[group.label] = int(group.handle._get_sequence_number_for_group())
    return found


def group_waited_in(frame: FrameType | None) -> str:
    """`name description` of the group whose collective the thread is calling, empty for none.

    The flight recorder knows a collective only once it is issued; the first one of a group sets up the connections
    before that, and waits for the other ranks there.
    """
    within = (TORCH, _WRAPPERS)
    calls = takewhile(lambda call: call.f_code.co_filename.startswith(within), islice(frames_from(frame), 8))
    named = (_group_given(call.f_locals) for call in calls)
    return first(label for label in named if label is not None) or ""


def _group_given(values: Mapping[str, Any]) -> str | None:
    """The group that a call is given, by its name or itself; None where it is given none, empty for an unknown one."""
    by_name = {group.name: group.label for group in _groups()}
    given = [values.get("group_name")]
    arguments = values.get("args")
    if isinstance(arguments, tuple):
        given += arguments
    for one in given:
        if isinstance(one, str) and one in by_name:
            return by_name[one]
    handle = values.get("group", "none is given")
    if handle is None:  # all ranks
        handle = dist.group.WORLD
    if not isinstance(handle, dist.ProcessGroup):
        return None
    labels = {group.handle: group.label for group in _groups()}
    return labels.get(handle, "")


def point_to_point(frame: FrameType | None) -> tuple[str, int] | None:
    """(`send` or `recv`, global rank of the peer) when the thread is in that call; gloo's recorder leaves them out."""
    calls = takewhile(lambda call: is_torch(call.f_code.co_filename), islice(frames_from(frame), 6))
    call = first(call for call in calls if call.f_code in _PEERS)
    if call is None:
        return None
    code = call.f_code
    peer = _peer(call.f_locals, _PEERS[code])
    return (code.co_name, peer) if peer is not None else None


def waits_for_work(frame: FrameType | None) -> bool:
    """True when the thread is in `wait()` of an object of torch: it has no Python frame of its own."""
    return frame is not None and _calls_wait(frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=256)
def _calls_wait(code: CodeType, at: int) -> bool:
    """True where the instruction at an offset calls what was loaded as `.wait` before it."""
    before: deque[dis.Instruction] = deque(maxlen=_LOADED_BEFORE)
    for one in dis.get_instructions(code):
        if one.offset > at:
            break
        before.append(one)
    is_call = bool(before) and "CALL" in before[-1].opname
    loaded = [one.argval for one in before if one.opname in ("LOAD_ATTR", "LOAD_METHOD")]
    return is_call and loaded[-1:] == ["wait"]


def _peer(values: Mapping[str, Any], name: str) -> int | None:
    """Global rank of the peer: the caller gives that, or its rank in the group."""
    peer: int | None = values.get(name)
    group_peer = values.get(f"group_{name}")
    if peer is not None or group_peer is None:
        return peer
    group = values.get("group") or dist.group.WORLD
    return int(dist.get_global_rank(group, group_peer))


def wrap_calls(target: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """`target` with its calls going through `wrap`: the same object for a module, a new callable otherwise."""
    if not isinstance(target, torch.nn.Module):
        return wrap(target)
    if target._compiled_call_impl is not None:
        target._compiled_call_impl = wrap(target._compiled_call_impl)
    else:
        target.forward = wrap(target.forward)
    return target


def main_thread_frame(ident: int) -> FrameType | None:
    """Innermost Python frame of a thread, by its ident."""
    return sys._current_frames().get(ident)
