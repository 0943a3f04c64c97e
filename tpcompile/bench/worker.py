"""In the process of a rank: a task and a connection -> one answer to every request, until the connection is closed.

Answers are dicts: what was asked for, or `failed` with one line; the traceback goes to this rank's log. Before a long
step a rank sends where it is (`at`), so that a rank that hangs can be named. A rank whose program failed ends; the
process that started it then ends the other ranks of that program.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tpcompile import config
from tpcompile.bench import floors, reference
from tpcompile.bench.contract import BenchContext
from tpcompile.bench.names import Name
from tpcompile.bench.power import NoMeterError, drawn
from tpcompile.bench.profiled import profiled
from tpcompile.bench.programs import build, captured, compiled_call, notes_of
from tpcompile.bench.reference import Given, OwnReference
from tpcompile.bench.step import Call, finish, timed_ms
from tpcompile.errors import ConfigError, PreflightError, TpCompileError
from tpcompile.gate.outputs import forget_gradients
from tpcompile.profiles import Profiled
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.recording import CaptureSession

FLOORS = "floors"
"""The task of the processes that measure rates and write the reference."""
STACKS = signal.SIGUSR1
"""On this signal a rank writes the stacks of its threads into its log, whatever it waits for."""
_WARM_CALLS = 4
_MAX_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arguments of the process of one rank."""

    program: str
    """A name, or `FLOORS`."""
    settings: str
    """JSON for `server`: a RunConfig for `serve`."""
    folder: str = ""
    """Where the reference is."""
    environ: Mapping[str, str]
    """Compile caches of this program, and torchrun's variables."""
    log: str
    """File of this rank's stdout and stderr."""
    timeout_s: float
    server: str = "tpcompile.bench.worker:serve"
    """`module:function`, called with the connection and this task; it answers."""


class Served(Protocol):
    """This rank's part of a program, as `answer_all` drives it."""

    def compiled(self) -> dict[str, Any]:
        """Make the first call, which compiles; the first answer."""
        ...

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        ...

    def release(self) -> None:
        """End what must end before the process group does, such as CUDA graphs."""
        ...


def main(connection: Connection, task: Task) -> None:
    """The target of a rank's process."""
    os.environ.update(task.environ)
    _write_output_to(Path(task.log))
    faulthandler.register(STACKS)
    try:
        module, _, function = task.server.partition(":")
        getattr(importlib.import_module(module), function)(connection, task)
    except BaseException as error:
        _fail(connection, error)


def _fail(connection: Connection, error: BaseException) -> NoReturn:
    """Send the error and exit at once: a clean exit, or the end of the process group, waits for the other ranks."""
    traceback.print_exc()
    with suppress(OSError):  # the one that asked has ended
        connection.send({"failed": _line(error), "is_refusal": isinstance(error, (ConfigError, PreflightError))})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _line(error: BaseException) -> str:
    """The error in one line; ours without the name of their class."""
    text = " ".join(str(error).split())
    shown = text if isinstance(error, TpCompileError) else f"{type(error).__name__}: {text}"
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}..."


def _write_output_to(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def serve(connection: Connection, task: Task) -> None:
    """Serve a program of `tpcompile bench`, or measure its floors."""
    settings = _settings(task.settings)
    with in_group(connection, task, device=settings.device) as (group, device):
        if task.program == FLOORS:
            _answer_floors(connection, group, device)
        else:
            given = Given.read(Path(task.folder), device)
            answer_all(connection, lambda: _Served(task.program, given, context_of(settings, given, group, device)))


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


@contextmanager
def in_group(connection: Connection, task: Task, *, device: str) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The process group of the program's ranks and this rank's device; an exception inside ends the process."""
    connection.send({"at": "the start of its process group"})
    env = rank_env()
    chosen = choose_device(device, env)
    if chosen.type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has those of its parent
    with process_group(env, chosen, timeout_s=task.timeout_s) as group:
        try:
            yield group, chosen
        except BaseException as error:
            _fail(connection, error)


def answer_all(connection: Connection, build: Callable[[], Served]) -> None:
    """Build a program, call it, and answer requests until the connection is closed."""
    connection.send({"at": "the build of its program"})
    served = build()
    connection.send({"at": "compile and first call"})
    connection.send(served.compiled())
    while request := connection.recv():
        connection.send({"at": f"the {next(iter(request))}"})
        connection.send(served.answer(request))
    served.release()


def _answer_floors(connection: Connection, group: Any, device: torch.device) -> None:
    """For each preset the floors; then rank 0 computes the reference, while the others wait for the next request."""
    while request := connection.recv():
        settings = _settings(request["settings"])
        connection.send({"at": "floors"})
        measured = floors.measure(settings.block, group.size(), device)
        if group.rank() == 0:
            connection.send({"at": "the single-device reference"})
            reference.write(settings, Path(request["folder"]), device)
        free(device)
        connection.send({"floors": measured.model_dump(), "machine": machine(device)})


def _settings(text: str) -> config.RunConfig:
    found = config.parse(text)
    assert isinstance(found, config.RunConfig), "the benchmark runs presets"
    return found


def free(device: torch.device) -> None:
    """Release what is not used, for the other programs on this device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    """The device and the versions that are used on it."""
    is_gpu = device.type == "cuda"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if is_gpu else "-"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else "cpu",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda or "-",
        "nccl": nccl,
        "python": platform.python_version(),
        "transformers": _version("transformers"),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


class _Served:
    """A program of the benchmark on this rank."""

    def __init__(self, program: str, given: Given, context: BenchContext) -> None:
        self._name, self._context, self._device = Name.of(program), context, context.device
        self._program = build(self._name, context)
        self._expected = given if self._program.reference is None else OwnReference(self._program)
        free(self._device)  # what was unsharded
        self._plain = compiled_call(self._name, context, self._program)
        self._timed = self._plain

    def compiled(self) -> dict[str, Any]:
        """The first call, while other programs compile: fields of the row."""
        first_s = self._seconds(self._plain)
        free(self._device)
        return {
            "compile_s": None if self._is_eager else first_s,
            "notes": notes_of(self._name, self._context, self._program),
            "reference": self._expected.key,
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`warm`: calls and the capture. `round`: ms of so many calls. `power`: their energy. `profile`: the last."""
        ((what, value),) = request.items()
        if what == "warm":
            return self._warmed()
        if what == "round":
            return self._round(value)
        if what == "power":
            return self._power(value)
        profile = profiled(self._timed, self._device).model_dump()
        return {"profile": profile, **self._errors()}

    def _round(self, num_calls: int) -> dict[str, Any]:
        ms = timed_ms(self._timed, num_calls, self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of many programs it may not fit; the calls before the clock get it again
        return {"ms": ms}

    def _power(self, num_calls: int) -> dict[str, Any]:
        """All ranks call; one without a counter answers why."""
        try:
            return {"power": drawn(self._timed, num_calls, self._device).model_dump()}
        except NoMeterError as error:
            return {"why_not": str(error)}

    def _warmed(self) -> dict[str, Any]:
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
        began = time.perf_counter()
        self._timed = captured(self._name, self._context, self._plain)
        finish(self._device)
        capture_s = time.perf_counter() - began
        step_s = min(self._seconds(self._timed) for _ in range(3))
        # Now: the memory of a graph is not counted when it is replayed, and that of a comparison is not the program's.
        peak = torch.cuda.max_memory_allocated(self._device) if is_gpu else None
        numbers = {"capture_s": capture_s, "regions_per_call": entered, "step_ms": step_s * 1e3, "peak_bytes": peak}
        numbers |= self._errors()
        free(self._device)
        return numbers

    def release(self) -> None:
        """Release CUDA graphs before the process group is destroyed."""
        for call in (self._timed, self._plain):
            if isinstance(call, Profiled):
                call.close()
        gc.collect()

    @property
    def _is_eager(self) -> bool:
        return self._name.base == "eager"

    def _errors(self) -> dict[str, Any]:
        """Errors of one more call of what is timed."""
        if self._program.step is not None:
            forget_gradients(self._program.program, self._program.inputs)  # a step may add to those of calls before
        results = self._timed()
        finish(self._device)
        if self._program.check is not None:
            self._program.check()
        ratio, worst = self._expected.error(results, self._program)
        return {"error_ratio": ratio, "worst": worst}

    def _seconds(self, call: Call) -> float:
        began = time.perf_counter()
        call()
        finish(self._device)
        return time.perf_counter() - began


def regions(call: Callable[[], Any]) -> float:
    """Compiled regions that a warm call enters."""
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())
