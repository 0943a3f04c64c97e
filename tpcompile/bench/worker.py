"""Process of a rank: a task and a connection -> one answer to every request, until the connection is closed.

Answers are dicts: what was asked for, or `failed` with one line; the traceback goes to this rank's log. A rank whose
program failed ends; the process that started it then ends the other ranks of that program.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import platform
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import config
from tpcompile.bench import floors, single_device
from tpcompile.bench.contract import BenchContext
from tpcompile.bench.names import Name
from tpcompile.bench.power import NoMeterError, drawn
from tpcompile.bench.programs import Forms, build
from tpcompile.bench.single_device import Expected, Given
from tpcompile.bench.step import finish, profiled, seconds, timed_ms
from tpcompile.by_size import sums
from tpcompile.errors import ConfigError, PreflightError, TpCompileError
from tpcompile.gate.outputs import forget_gradients
from tpcompile.gate.reference import free
from tpcompile.profiles import Profiled
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.ranks.pool import become
from tpcompile.recording import CaptureSession
from tpcompile.version import installed

FLOORS = "floors"
"""The task of the processes that measure rates and write the reference."""
STACKS = signal.SIGUSR1
"""Signal on which a rank writes the stacks of its threads into its log, whatever it waits for."""
_WARM_CALLS = 4
_MAX_TEXT = 300
"""Characters of an error that go into the row of a program; the log has all of it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arguments of the process of each rank."""

    program: str
    """A name, or `FLOORS`."""
    settings: str
    """JSON for `server`: a RunConfig for `serve`."""
    folder: str = ""
    """Folder of the reference, written by `single_device.write`."""
    environ: Mapping[str, str]
    """Compile caches of this program."""
    log: str
    """Stdout and stderr of a rank go to the file of this name with `.rankN.log`."""
    timeout_s: float
    server: str = "tpcompile.bench.worker:serve"
    """`module:function`, called with the connection and this task; it answers."""


def main(connection: Connection, task: Task, variables: Mapping[str, str]) -> None:
    """The target of a rank's process, with torchrun's variables."""
    log = os.open(f"{task.log}.rank{variables['RANK']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    become({**os.environ, **task.environ, **variables}, log, log)
    faulthandler.register(STACKS)
    try:
        module, _, function = task.server.partition(":")
        getattr(importlib.import_module(module), function)(connection, task)
    except BaseException as error:
        _fail(connection, error)


def _fail(connection: Connection, error: BaseException) -> NoReturn:
    """Send the error in one line and exit at once: a clean exit, or the end of the group, waits for the other ranks."""
    traceback.print_exc()
    text = " ".join(str(error).split())
    if not isinstance(error, TpCompileError):
        text = f"{type(error).__name__}: {text}"
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}..."
    with suppress(OSError):  # the one that asked has ended
        connection.send({"failed": text, "is_refusal": isinstance(error, (ConfigError, PreflightError))})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def in_group(connection: Connection, task: Task, *, device: str) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The process group of the program's ranks and this rank's device; an exception inside ends the process."""
    env = rank_env()
    chosen = choose_device(device, env)
    if chosen.type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has those of its parent
    with process_group(env, chosen, timeout_s=task.timeout_s) as group:
        try:
            yield group, chosen
        except BaseException as error:
            _fail(connection, error)


def answer_all(connection: Connection, steps: object) -> None:
    """Say that this rank is in its group; answer requests by methods of `steps` until the connection is closed."""
    connection.send({})
    while request := connection.recv():
        step, values = request
        connection.send(getattr(steps, step)(*values))


def serve(connection: Connection, task: Task) -> None:
    """Serve a program of `tpcompile bench`, or measure its floors."""
    settings = _settings(task.settings)
    with in_group(connection, task, device=settings.device) as (group, device):
        if task.program == FLOORS:
            answer_all(connection, _Floors(group, device))
            return
        given = Given.read(Path(task.folder), device)
        steps = _Steps(Name.of(task.program), given, context_of(settings, given, group, device))
        answer_all(connection, steps)
        steps.release()


def context_of(
    settings: config.RunConfig, given: Given, group: dist.ProcessGroup, device: torch.device
) -> BenchContext:
    """The argument of a user's FUNCTION on this rank."""
    return BenchContext(
        rank=group.rank(),
        world_size=group.size(),
        device=device,
        mesh=DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",)),
        settings=settings.block.model_dump(),
        config=settings,
        weights=given.weights,
        inputs=given.inputs,
        cotangent=given.cotangent,
    )


class _Floors:
    """What is measured and computed for a preset before its programs start."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def floors(self, settings: str) -> dict[str, Any]:
        """The rates of this rank's device."""
        measured = floors.measure(_settings(settings).block, self._group.size(), self._device)
        free(self._device)
        return {"floors": measured.model_dump(), "machine": machine(self._device)}

    def tune(self, settings: str) -> dict[str, Any]:
        """Measure sums by size while nothing else runs, for programs that then find them in the cache."""
        sums("by_size", self._group, timeout_s=_settings(settings).gate.store_timeout_s)
        free(self._device)
        return {}

    def reference(self, settings: str, folder: str) -> dict[str, Any]:
        """Rank 0 computes it, while the others wait for the next request."""
        if self._group.rank() == 0:
            single_device.write(_settings(settings), Path(folder), self._device)
        free(self._device)
        return {}


def _settings(text: str) -> config.RunConfig:
    found = config.parse(text)
    assert isinstance(found, config.RunConfig), "the benchmark runs presets"
    return found


def machine(device: torch.device) -> dict[str, str]:
    """The device and the versions that are used on it."""
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "triton": installed("triton") or "-",
        "cuda": torch.version.cuda or "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else "-",
        "python": platform.python_version(),
        "transformers": installed("transformers") or "-",
    }


class _Steps:
    """The steps of a program on this rank, in their order; `round`, `power` and `profile` are of the captured form."""

    def __init__(self, name: Name, given: Given, context: BenchContext) -> None:
        self._name, self._given, self._context, self._device = name, given, context, context.device
        self._is_eager = name.base == "eager"

    def build(self) -> dict[str, Any]:
        """Fields of the row."""
        self._program = build(self._name, self._context)
        self._expected = Expected(self._program, self._given)
        free(self._device)  # what was unsharded
        self._forms = Forms(self._name, self._context, self._program)
        self._plain = self._timed = self._forms.plain()
        return {"notes": self._forms.notes, "reference": self._expected.key}

    def first_call(self) -> dict[str, Any]:
        """It compiles, while other programs do."""
        first_s = seconds(self._plain, self._device)
        free(self._device)
        return {"compile_s": None if self._is_eager else first_s}

    def warm(self) -> dict[str, Any]:
        """Warm calls and the capture, while no other program runs.

        Kernels that spin, of several programs on one GPU, take turns of milliseconds.
        """
        is_gpu = self._device.type == "cuda"
        free(self._device)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        entered = None if self._is_eager else regions(self._plain)
        for _ in range(_WARM_CALLS):
            self._plain()

        def capture() -> None:
            self._timed = self._forms.captured(self._plain)

        capture_s = seconds(capture, self._device)
        step_s = min(seconds(self._timed, self._device) for _ in range(3))
        # Now: the memory of a graph is not counted when it is replayed, and that of a comparison is not the program's.
        peak = torch.cuda.max_memory_allocated(self._device) if is_gpu else None
        numbers = {"capture_s": capture_s, "regions_per_call": entered, "step_ms": step_s * 1e3, "peak_bytes": peak}
        errors = self._errors()
        free(self._device)
        return numbers | errors

    def round(self, num_calls: int) -> dict[str, Any]:
        """Mean ms of so many calls."""
        ms = timed_ms(self._timed, num_calls, self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of many programs it may not fit; the calls before the clock get it again
        return {"ms": ms}

    def power(self, num_calls: int) -> dict[str, Any]:
        """The energy of so many calls, which all ranks make; one without a counter answers why."""
        try:
            return {"power": drawn(self._timed, num_calls, self._device).model_dump()}
        except NoMeterError as error:
            return {"why_not": str(error)}

    def profile(self) -> dict[str, Any]:
        """The last step, since a profiler stays in a process; and the errors after all calls."""
        return {"profile": profiled(self._timed, self._device).model_dump(), **self._errors()}

    def release(self) -> None:
        """Release CUDA graphs: those that hold a communicator make the end of the process group wait."""
        for call in (self._timed, self._plain):
            if isinstance(call, Profiled):
                call.close()
        gc.collect()

    def _errors(self) -> dict[str, Any]:
        """Errors of one more call of what is timed."""
        if self._program.step is not None:
            forget_gradients(self._program.program, self._program.inputs)  # a step may add to those of calls before
        results = self._timed()
        finish(self._device)
        if self._program.check is not None:
            self._program.check()
        ratio, worst = self._expected.error(results)
        return {"error_ratio": ratio, "worst": worst}


def regions(call: Callable[[], object]) -> float:
    """Compiled regions that a warm call enters."""
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())
