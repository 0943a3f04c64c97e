"""Programs of the benchmark, built and called in eager on every rank."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from tpcompile import config
from tpcompile.bench import reference
from tpcompile.bench.names import Name
from tpcompile.bench.programs import Setup, build, compiled_call
from tpcompile.bench.reference import Given
from tpcompile.bench.step import forward_call, training_call
from tpcompile.bench.worker import compared

CPU = torch.device("cpu")


def errors(programs: list[str], preset: str, overrides: list[str], train: bool, folder: str) -> dict[str, float]:
    """Program -> its largest error on this rank, as a multiple of the single-device error."""
    settings = config.load(preset, overrides, train=train, device="cpu")
    if dist.get_rank() == 0:
        reference.write(settings, Path(folder), CPU)
    dist.barrier()
    given, group = Given.read(Path(folder), CPU), dist.group.WORLD
    assert group is not None
    found = {}
    for program in programs:
        built = build(Setup(Name.of(program), settings, given, group, CPU))
        call = forward_call(built.module, built.inputs)
        if given.cotangent is not None:
            call = training_call(built.module, built.module, built.inputs, given.cotangent)
        with built.around():
            results = compared(call())
        found[program] = given.error(results, built.slice_of, built.renamed)[0]
    return found


def compiled(program: str, folder: str) -> tuple[float, tuple[str, ...]]:
    """The error of the compiled program, and what its row says."""
    settings = config.load("cpu_smoke", ["block.num_layers=1"], device="cpu")
    if dist.get_rank() == 0:
        reference.write(settings, Path(folder), CPU)
    dist.barrier()
    given, group = Given.read(Path(folder), CPU), dist.group.WORLD
    assert group is not None
    setup = Setup(Name.of(program), settings, given, group, CPU)
    built = build(setup)
    results = compiled_call(setup, built)()
    return given.error(compared(results), built.slice_of, built.renamed)[0], built.notes
