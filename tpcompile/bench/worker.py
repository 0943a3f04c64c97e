"""In the process of a rank: a task and a connection -> one answer for every request, until it is closed.

Answers are dicts: what was asked for, or `failed` with one line; the traceback goes to this rank's log. Before long
steps a rank says what it is `at`, so that one that hangs can be named. A rank whose program failed ends, and the one
that started it ends the other ranks of that program.
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
from torch.distributed.tensor import DTensor

from tpcompile import config
from tpcompile.bench import floors, reference
from tpcompile.bench.names import Name
from tpcompile.bench.power import NoMeterError, drawn
from tpcompile.bench.profiled import profiled
from tpcompile.bench.programs import Setup, build, captured, compiled_call
from tpcompile.bench.reference import COMPARED_LAYER, Given
from tpcompile.bench.step import Call, Results, finish, timed_ms
from tpcompile.errors import ConfigError, PreflightError, TpCompileError
from tpcompile.profiles import Profiled
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.recording import CaptureSession

FLOORS = "floors"
"""The task of the processes that measure rates and write the reference."""
STACKS = signal.SIGUSR1
"""At which a rank writes where its threads stand into its log, whatever it waits for."""
_WARM_CALLS = 4
_MAX_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the processes of one program are started with."""

    program: str
    """A name, or `FLOORS`."""
    settings: str
    """JSON of what serves it; of `serve`, a RunConfig."""
    folder: str = ""
    """Of the reference."""
    environ: Mapping[str, str]
    """Caches of its own, and torchrun's variables."""
    log: str
    """stdout and stderr of this rank."""
    timeout_s: float
    server: str = "tpcompile.bench.worker:serve"
    """`module:function` that is called with the connection and this task, and answers."""


class Served(Protocol):
    """A program of this rank that was built."""

    def compiled(self) -> dict[str, Any]:
        """The first answer, after the first call."""
        ...

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """To each request."""
        ...

    def release(self) -> None:
        """What must end before the process group does."""
        ...


def main(connection: Connection, task: Task) -> None:
    """The process."""
    os.environ.update(task.environ)
    _write_output_to(Path(task.log))
    faulthandler.register(STACKS)
    try:
        module, _, function = task.server.partition(":")
        getattr(importlib.import_module(module), function)(connection, task)
    except BaseException as error:
        _fail(connection, error)


def _fail(connection: Connection, error: BaseException) -> NoReturn:
    """At once: a clean end, or that of the process group, would wait for ranks that wait for this one."""
    traceback.print_exc()
    with suppress(OSError):  # the one that asked has ended
        connection.send({"failed": _line(error), "is_refusal": isinstance(error, (ConfigError, PreflightError))})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _line(error: BaseException) -> str:
    """In one line."""
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
    """A program of `tpcompile bench`, or its floors."""
    settings = _settings(task.settings)
    with in_group(connection, task, device=settings.device) as (group, device):
        if task.program == FLOORS:
            _answer_floors(connection, group, device)
        else:
            given = Given.read(Path(task.folder), device)
            setup = Setup(Name.of(task.program), settings, given, group, device)
            answer_all(connection, lambda: _Served(setup))


@contextmanager
def in_group(connection: Connection, task: Task, *, device: str) -> Iterator[tuple[dist.ProcessGroup, torch.device]]:
    """The process group of the program's ranks and this rank's device; what is raised there ends the process."""
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
    """For each preset rates first; then the reference, by one rank while the others wait for the next request."""
    while request := connection.recv():
        settings = _settings(request["settings"])
        connection.send({"at": "floors"})
        measured = floors.measure(settings.block, group, device)
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
    """For the other programs."""
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
    """The program of this rank."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._device = setup, setup.device
        self._built = build(setup)
        free(self._device)  # what was unsharded
        self._plain = compiled_call(setup, self._built)
        self._timed: Call | None = None

    def compiled(self) -> dict[str, Any]:
        """The first call, while other programs compile."""
        first_s = self._seconds(self._plain)
        free(self._device)
        return {"compile_s": None if self._setup.name.base == "eager" else first_s, "notes": list(self._built.notes)}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`warm`: calls, and the capture. `round`: the time of so many. `power`: their energy. `profile`: last."""
        ((what, value),) = request.items()
        if what == "warm":
            return self._warmed()
        if what == "round":
            return self._round(value)
        if what == "power":
            return self._power(value)
        return self._profiled()

    def _round(self, num_calls: int) -> dict[str, Any]:
        ms = timed_ms(self._call, num_calls, self._device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # of many programs it may not fit; the calls before the clock get it again
        return {"ms": ms}

    def _power(self, num_calls: int) -> dict[str, Any]:
        """All ranks call; one without a counter says why."""
        try:
            return {"power": drawn(self._call, num_calls, self._device).model_dump()}
        except NoMeterError as error:
            return {"why_not": str(error)}

    @property
    def _call(self) -> Call:
        """What is timed."""
        assert self._timed is not None, "a program is asked to warm up first"
        return self._timed

    def _warmed(self) -> dict[str, Any]:
        """While no other program runs: spinning kernels of several programs on one GPU take turns in milliseconds."""
        is_gpu = self._device.type == "cuda"
        free(self._device)
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        entered = None if self._setup.name.base == "eager" else regions(self._plain)
        for _ in range(_WARM_CALLS):
            self._plain()
        began = time.perf_counter()
        self._timed = captured(self._setup, self._plain)
        finish(self._device)
        capture_s = time.perf_counter() - began
        step_s = min(self._seconds(self._call) for _ in range(3))
        # Now: the memory of a graph is not counted when it is replayed, and that of a comparison is not the program's.
        peak = torch.cuda.max_memory_allocated(self._device) if is_gpu else None
        numbers = {"capture_s": capture_s, "regions_per_call": entered, "step_ms": step_s * 1e3, "peak_bytes": peak}
        numbers |= self._errors()
        free(self._device)
        return numbers

    def _profiled(self) -> dict[str, Any]:
        """What the profiler sees, and errors after all calls."""
        seen = profiled(self._call, self._device)
        return {"profile": seen.model_dump(), **self._errors()}

    def release(self) -> None:
        """CUDA graphs, before the group is destroyed."""
        for call in (self._timed, self._plain):
            if isinstance(call, Profiled):
                call.close()
        gc.collect()

    def _errors(self) -> dict[str, Any]:
        """Of one more call of what is timed."""
        results = self._call()
        finish(self._device)
        built = self._built
        if built.check is not None:
            built.check()
        ratio, worst = self._setup.given.error(compared(results), built.slice_of, built.renamed)
        return {"error_ratio": ratio, "worst": worst}

    def _seconds(self, call: Call) -> float:
        began = time.perf_counter()
        call()
        finish(self._device)
        return time.perf_counter() - began


def compared(results: Results) -> Results:
    """Gradients that are DTensors as full tensors: a collective, which all ranks call alike."""
    grads = results.grads
    if grads is None:
        return results
    compared = {name: one for name, one in grads.items() if name.startswith(COMPARED_LAYER)}
    full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in compared.items()}
    return Results(results.output, results.input_grad, full)


def regions(call: Callable[[], Any]) -> float:
    """Compiled regions that a warm call enters."""
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())
