"""`python -m tpcompile.fusion.win.measure_mode REQUEST`: a target and a mode -> what this process measured, as JSON."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.cli import ending
from tpcompile.errors import ConfigError, TargetRaised
from tpcompile.evidence.records import WrongCompiled
from tpcompile.fusion.manifest_records import Manifest, Role
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.targets import built_on, place_of
from tpcompile.fusion.win.decide import ERROR_LIMIT
from tpcompile.fusion.win.mode_records import Measured, Side
from tpcompile.numerics import error_ratio
from tpcompile.numerics.wrong_compiled import Route, search
from tpcompile.ranks.env import check_cpp_compiler
from tpcompile.target import Target, call_target, copied, raised_by
from tpcompile.torch_api import compiler
from tpcompile.torch_api.profiler import REGION, is_kernel, on_gpu, profiled_calls
from tpcompile.torch_api.simulated import local_ranks

app = ending.new_app()
_COLD_CALLS = 10
_COLD_RATIO = 1.5
_PROFILED_STEPS = 3
_NO_WORK = frozenset({
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::view", "aten::as_strided", "aten::t",
    "aten::transpose", "aten::permute", "aten::reshape", "aten::_unsafe_view", "aten::expand", "aten::slice",
    "aten::select", "aten::unsqueeze", "aten::squeeze", "aten::detach", "aten::alias", "aten::resolve_conj",
    "aten::resolve_neg", "aten::_reshape_alias", "aten::split", "aten::narrow", "aten::unbind", "aten::lift_fresh",
})  # fmt: skip
"""Leaf ops of eager code that move no data."""
_SEARCH_S = 120.0
"""Limit of the search in parts of graphs, after the measurements; the process has 600 s by default."""
_REPLAY = "cudaGraphLaunch"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the process is asked for; written as JSON into its first argument."""

    target: str
    settings: list[str]
    mode: str
    device: str
    rounds: int
    out: str
    is_first_call_only: bool = False


@dataclass(frozen=True)
class Program:
    """The target on this device."""

    target: Target
    device: torch.device
    name: str

    def copied(self, dtype: torch.dtype | None = None) -> Program:
        """A copy with weights and inputs of its own, floating ones in `dtype`."""
        program = copied(self.target.program, f"the program of {self.name}")
        inputs = copied(self.target.inputs, f"the input of {self.name}")
        if dtype is not None:
            program = program.to(dtype) if isinstance(program, nn.Module) else program
            inputs = error_ratio.cast(inputs, dtype)
        return replace(self, target=replace(self.target, program=program, inputs=inputs))

    def step(self, program: Any) -> Callable[[], Any]:
        """A call that has ended on the device when it returns.

        CUDA graphs are told that a step begins: those of a forward whose backward never comes would be recorded anew
        in every call.
        """

        def call() -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            with raised_by(self.name):
                result = call_target(self.target, program, self.target.inputs)
                self.finish()
            return result

        return call

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def results(self, step: Callable[[], Any]) -> dict[str, Tensor]:
        """Floating outputs and gradients of a step, copied: CUDA graphs use their memory again."""
        torch.manual_seed(0)
        found = error_ratio.named_tensors(step(), "output")
        program = self.target.program
        parameters = program.named_parameters() if isinstance(program, nn.Module) else ()
        for name, parameter in parameters:
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
        return {name: one.detach().clone() for name, one in found.items() if one.is_floating_point()}


def built(request: Request) -> Program:
    """Raises ConfigError for a target that cannot be built, or that compiles itself."""
    place = place_of(request.device)
    check_cpp_compiler("inductor", place)
    found = built_on(place, request.target, request.settings, nproc=1, building=nullcontext())
    if found.is_compiled:
        raise ConfigError(f"{request.target} calls torch.compile itself; return the program before it is compiled")
    return Program(found, place, request.target)


def measured(program: Program, request: Request) -> Measured:
    """First call, calls until it is warm, outputs, rounds that alternate with eager, and a profile of both."""
    eager_side, compiled_side = program.copied(), program.copied()
    eager = eager_side.step(eager_side.target.program)
    compiled = compiled_side.step(torch.compile(compiled_side.target.program, mode=request.mode))
    with FusionRecorder() as recorder:
        began = time.perf_counter()
        results = compiled_side.results(compiled)
        first_call_s = time.perf_counter() - began
    exact = _exact(program)
    first_error = _error_ratio(exact.first, results, eager_side.results(eager))
    cold_ms = [_ms(compiled)]
    before = compiler.dynamo_counters() | compiler.cuda_graph_counters()
    cold_ms += [_ms(compiled) for _ in range(_COLD_CALLS - 1)]
    for _ in range(_COLD_CALLS):
        eager()
    eager_ms, compiled_ms = [], []
    for _ in range(request.rounds):
        eager_ms.append(_ms(eager))
        compiled_ms.append(_ms(compiled))
    after = compiler.dynamo_counters() | compiler.cuda_graph_counters()
    # As often called as eager; under CUDA graphs a replay.
    last_error = _error_ratio(exact.again, compiled_side.results(compiled), eager_side.results(eager))
    worst_error = max(filter(None, (first_error, last_error)), default=first_error)
    steady_ms = statistics.median(compiled_ms)
    slow = [number for number, ms in enumerate(cold_ms, 1) if ms > _COLD_RATIO * steady_ms]
    manifest = recorder.manifest()
    compiled_profile = _side(program, compiled, manifest, compiled_ms)
    return Measured(
        mode=request.mode,
        eager=_side(program, eager, None, eager_ms)[0],
        compiled=compiled_profile[0],
        error_ratio=worst_error,
        wrong_compiled=_wrong_code(program, request, exact, worst_error),
        first_call_s=first_call_s,
        cached_s=None,
        num_cold_calls=max(slow, default=0),
        num_graphs=before["graphs"],
        num_regions=compiled_profile[1],
        num_breaks=before["breaks"],
        num_recompiles=after["graphs"] - before["graphs"],
        num_rerecorded=after["recorded"] - before["recorded"],
        num_not_recorded=after["skipped"],
    )


def _ms(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


@dataclass(frozen=True)
class _Exact:
    """Outputs in float64."""

    first: dict[str, Tensor] | None = None
    """Outputs of the first call; None where the program cannot run in float64, as a function with its own tensors."""
    again: dict[str, Tensor] | None = None
    """Outputs of any later call; None where a call changes what the next one computes."""


def _exact(program: Program) -> _Exact:
    exactly = program.copied(torch.float64)
    step = exactly.step(exactly.target.program)
    try:
        first, second = exactly.results(step), exactly.results(step)
    except TargetRaised:
        return _Exact()
    if not first:
        return _Exact()
    is_stateless = all(torch.equal(value, second[name]) for name, value in first.items())
    return _Exact(first, second if is_stateless else None)


def _error_ratio(exact: dict[str, Tensor] | None, got: dict[str, Tensor], eager: dict[str, Tensor]) -> float | None:
    if exact is None:
        return None
    ratios = []
    for name, value in exact.items():
        is_there = name in got and got[name].shape == value.shape
        if not is_there:
            return math.inf
        error = error_ratio.error_of(got[name], eager[name], value)
        if not error["is_judged"]:
            return None
        ratios.append(error["ratio"])
    is_nan = any(map(math.isnan, ratios))
    return math.inf if is_nan else max(ratios)


def _wrong_code(program: Program, request: Request, exact: _Exact, worst: float | None) -> WrongCompiled | None:
    """Where compiled code is wrong: it is compared with float64, which has no collectives of several ranks here."""
    right = exact.again
    if right is None or worst is None or worst <= ERROR_LIMIT:
        return None
    eager_side, compiled_side = program.copied(), program.copied()
    compiled = compiled_side.step(torch.compile(compiled_side.target.program, mode=request.mode))
    eager = eager_side.results(eager_side.step(eager_side.target.program))

    def is_right(results: dict[str, Tensor]) -> bool:
        error = _error_ratio(right, results, eager)
        return error is not None and error <= ERROR_LIMIT

    began = time.process_time()
    compiled_side.results(compiled)
    route = Route(
        call=lambda: compiled_side.results(compiled),
        is_right=is_right,
        reset=torch.compiler.reset,
        all_say=lambda _question, answer: {0: answer},
        folder=Path(mkdtemp(prefix="tpcompile-repro-")),
        timeout_s=_SEARCH_S,
        red_cpu_s=time.process_time() - began,
    )
    return search(route)


# What the profiler sees


def _side(
    program: Program, step: Callable[[], Any], manifest: Manifest | None, step_ms: list[float]
) -> tuple[Side, int]:
    """Also the compiled regions that a step enters."""
    events, profiled_ms = profiled_calls(step, _PROFILED_STEPS, program.device)
    regions = sum(event.name.startswith(REGION) for event in events) // _PROFILED_STEPS
    median_ms = statistics.median(step_ms)
    if program.device.type == "cuda":
        found = _on_gpu(events, step_ms, median_ms)
    else:
        found = _on_cpu(events, manifest, step_ms, profiled_ms)
    return found, regions


def _on_gpu(events: list[Any], step_ms: list[float], median_ms: float) -> Side:
    kernels = [event for event in on_gpu(events) if is_kernel(event.name)]
    of_library = [event for event in kernels if not event.name.startswith("triton_")]
    kernels_us, library_us = _total_us(kernels), _total_us(of_library)
    return Side(
        step_ms=tuple(step_ms),
        launches=len(kernels) // _PROFILED_STEPS,
        library_share=library_us / kernels_us if kernels_us else 0.0,
        busy_share=kernels_us / 1e3 / _PROFILED_STEPS / median_ms,
        num_replays=sum(event.name == _REPLAY for event in events) // _PROFILED_STEPS,
    )


def _on_cpu(events: list[Any], manifest: Manifest | None, step_ms: list[float], profiled_ms: float) -> Side:
    """The profiler sees no loop nests of generated code: they are counted in the manifest.

    Times of ops are a part of the steps that were profiled, which are slower than others.
    """
    work = [event for event in events if event.name.startswith("aten::") and event.name not in _NO_WORK]
    # The outermost op that does it: `aten::matmul`'s `aten::mm`, not the `aten::copy_` within it.
    inside = [{child.name for child in event.cpu_children if child.name.startswith("aten::")} for event in work]
    ops = [event for event, names in zip(work, inside, strict=True) if names <= _NO_WORK]
    graphs = manifest.graphs if manifest else ()
    generated = sum(launch.role is Role.KERNEL for graph in graphs for launch in graph.launches)
    ops_ms = _total_us(ops) / 1e3 / _PROFILED_STEPS
    return Side(
        step_ms=tuple(step_ms),
        launches=len(ops) // _PROFILED_STEPS + generated,
        library_share=min(1.0, ops_ms / profiled_ms),
        busy_share=None,
    )


def _total_us(events: list[Any]) -> float:
    return sum(event.time_range.elapsed_us() for event in events)


@app.command()
def main(path: Path) -> None:
    """Write the measurements, or of a second process the seconds of its first call."""
    request = Request(**json.loads(path.read_text()))
    with local_ranks(1):
        program = built(request)
        if request.is_first_call_only:
            step = program.step(torch.compile(program.target.program, mode=request.mode))
            began = time.perf_counter()
            step()
            found = json.dumps({"first_call_s": time.perf_counter() - began})
        else:
            found = measured(program, request).to_json(indent=1)
    Path(request.out).write_text(found)


if __name__ == "__main__":
    ending.run(app, "tpcompile verify-win")
