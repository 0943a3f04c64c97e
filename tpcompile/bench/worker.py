"""In the process of a rank: a task and a connection -> one answer for every request, until it is closed.

Answers are dicts: what was asked for, or `failed` with one line; the traceback goes to this rank's log. A rank whose
program failed ends, and the one that started it ends the other ranks of that program.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from tpcompile import config
from tpcompile.bench import floors, reference
from tpcompile.bench.names import Name
from tpcompile.bench.profiled import profiled
from tpcompile.bench.programs import Program, Setup, build, captured, compiled_call
from tpcompile.bench.reference import COMPARED_LAYER, Given
from tpcompile.bench.step import Call, Results, finish, timed_ms
from tpcompile.errors import TpCompileError
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.recording import CaptureSession

FLOORS = "floors"
"""The task of the processes that measure rates and write the reference."""
_WARM_CALLS = 4
_MAX_TEXT = 300


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the processes of one program are started with."""

    program: str
    """A name, or `FLOORS`."""
    settings: str
    """JSON of a RunConfig."""
    folder: str
    """Of the reference."""
    environ: Mapping[str, str]
    """torchrun's variables and caches of its own."""
    prefix: str
    """Of the store: every program has a process group of its own."""
    log: str
    """stdout and stderr of this rank."""
    timeout_s: float


def main(connection: Connection, task: Task) -> None:
    """The process."""
    os.environ.update(task.environ)
    _write_output_to(Path(task.log))
    try:
        _serve(connection, task)
    except BaseException as error:
        _fail(connection, error)
    _end(0)


def _fail(connection: Connection, error: BaseException) -> NoReturn:
    """At once: destroying the process group would wait for ranks that wait for this one."""
    traceback.print_exc()
    with suppress(OSError):  # the one that asked has ended
        connection.send({"failed": _line(error)})
    _end(1)


def _end(code: int) -> NoReturn:
    """Without the interpreter's own clean-up: what is left of CUDA then may wait for a peer."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


def _serve(connection: Connection, task: Task) -> None:
    settings = config.parse(task.settings)
    assert isinstance(settings, config.RunConfig), "the benchmark runs presets"
    env = rank_env()
    device = choose_device(settings.device, env)
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has those of its parent
    with process_group(env, device, timeout_s=task.timeout_s, prefix=task.prefix) as group:
        try:
            if task.program == FLOORS:
                connection.send(_floors(settings, Path(task.folder), group, device))
                connection.recv()
            else:
                given = Given.read(Path(task.folder), device)
                _answer_all(connection, Setup(Name.of(task.program), settings, given, group, device))
        except BaseException as error:
            _fail(connection, error)


def _answer_all(connection: Connection, setup: Setup) -> None:
    served = _Served(setup)
    connection.send(served.prepared())
    while request := connection.recv():
        connection.send(served.answer(request))
    served.release()


def _floors(settings: config.RunConfig, folder: Path, group: Any, device: torch.device) -> dict[str, Any]:
    """Rates first; then the reference, by one rank while the others wait to be closed."""
    measured = floors.measure(settings.block, group, device)
    if group.rank() == 0:
        reference.write(settings, folder, device)
    return {"floors": measured.model_dump(), "machine": _machine(device)}


def _machine(device: torch.device) -> dict[str, str]:
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
        self._program: Program | None = None

    def prepared(self) -> dict[str, Any]:
        """Build, compile, warm up, capture; compared once."""
        setup = self._setup
        built = build(setup)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what was unsharded, for the other programs
        plain = compiled_call(setup, built)
        first_s = self._seconds(plain)
        regions = None if setup.name.base == "eager" else _regions(plain)
        for _ in range(_WARM_CALLS):
            plain()
        began = time.perf_counter()
        self._program = captured(setup, built, plain)
        finish(self._device)
        capture_s = time.perf_counter() - began if self._program.call is not plain else 0.0
        step_s = min(self._seconds(self._program.call) for _ in range(3))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        return {
            "compile_s": None if setup.name.base == "eager" else first_s + capture_s,
            "regions_per_call": regions,
            "step_ms": step_s * 1e3,
            "notes": list(built.notes),
            **self._errors(),
        }

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """`round`: the time of so many calls. `profile`: what the profiler sees, memory, and errors after all calls."""
        assert self._program is not None, "prepared comes first"
        if "round" in request:
            return {"ms": timed_ms(self._program.call, request["round"], self._device)}
        peak = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        seen = profiled(self._program.call, self._device)
        return {"profile": seen.model_dump(), "peak_bytes": peak, **self._errors()}

    def release(self) -> None:
        """Graphs, before the group."""
        if self._program is not None:
            self._program.release()
        self._program = None
        gc.collect()

    def _errors(self) -> dict[str, Any]:
        """Of one more call of what is timed."""
        assert self._program is not None
        results = self._program.call()
        finish(self._device)
        built = self._program.built
        if built.check is not None:
            built.check()
        ratio, worst = self._setup.given.error(_compared(results), built.slice_of, built.renamed)
        return {"error_ratio": ratio, "worst": worst}

    def _seconds(self, call: Call) -> float:
        began = time.perf_counter()
        call()
        finish(self._device)
        return time.perf_counter() - began


def _compared(results: Results) -> Results:
    """Gradients that are DTensors as full tensors: a collective, which all ranks call alike."""
    grads = results.grads
    if grads is None:
        return results
    compared = {name: one for name, one in grads.items() if name.startswith(COMPARED_LAYER)}
    full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in compared.items()}
    return Results(results.output, results.input_grad, full)


def _regions(call: Call) -> float:
    """Compiled regions that a warm call enters."""
    with CaptureSession() as session, session.phase("count"):
        call()
    return sum(count.entered for count in session.region_counts())


