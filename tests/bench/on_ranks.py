"""Programs of the benchmark, built and called in eager on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tpcompile import config
from tpcompile.bench import single_device
from tpcompile.bench.contract import BenchContext
from tpcompile.bench.names import Name
from tpcompile.bench.programs import Forms, build, call_of
from tpcompile.bench.single_device import Expected, Given
from tpcompile.bench.worker import context_of
from tpcompile.errors import ConfigError

CPU = torch.device("cpu")


def given(settings: config.RunConfig, folder: str) -> tuple[Given, BenchContext]:
    """The block on one device, and what programs are built from."""
    if dist.get_rank() == 0:
        single_device.write(settings, Path(folder), CPU)
    dist.barrier()
    found, group = Given.read(Path(folder), CPU), dist.group.WORLD
    assert group is not None
    return found, context_of(settings, found, group, CPU)


def errors(programs: list[str], preset: str, overrides: list[str], train: bool, folder: str) -> dict[str, float]:
    """Program -> its largest error on this rank, as a multiple of the single-device error."""
    block, context = given(config.load(preset, overrides, train=train, device="cpu"), folder)

    found = {}
    for name in programs:
        program = build(Name.of(name), context)
        results = call_of(program.program, program, context.cotangent)()
        found[name] = Expected(program, block).error(results)[0]
    return found


def refusals(cases: list[tuple[str, str, list[str], bool]]) -> list[str]:
    """(program, preset, overrides, train) -> why it cannot be built, before it asks for weights."""
    found, group = [], dist.group.WORLD
    assert group is not None
    for program, preset, overrides, train in cases:
        settings = config.load(preset, overrides, train=train, device="cpu")
        nothing: Any = Given(weights={}, inputs=None, cotangent=None, single={}, exact={})  # type: ignore[arg-type]
        try:
            build(Name.of(program), context_of(settings, nothing, group, CPU))
        except ConfigError as error:
            found.append(str(error))
    return found


def compiled(program: str, folder: str) -> tuple[float, tuple[str, ...]]:
    """The error of the compiled program, and what its row says."""
    block, context = given(config.load("cpu_smoke", ["block.num_layers=1"], device="cpu"), folder)
    name = Name.of(program)
    built = build(name, context)
    forms = Forms(name, context, built)
    return Expected(built, block).error(forms.plain()())[0], forms.notes
