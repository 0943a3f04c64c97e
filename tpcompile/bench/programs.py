"""A name and what all programs are given -> the program of this rank, compiled and captured as its variants say."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tpcompile.bench import ours
from tpcompile.bench.contract import BenchContext, Program
from tpcompile.bench.names import AUTOTUNED, BY_SIZE, GRAPHED, ONE_SHOT, Name
from tpcompile.bench.step import Call, Results, forward_call, training_call
from tpcompile.by_size import sums
from tpcompile.choices import Profile
from tpcompile.errors import ConfigError
from tpcompile.profiles import TUNED, Profiled, run
from tpcompile.target import Target
from tpcompile.torch_api import symmetric

_ONE_SHOT = {"_collective.auto_select": True, "_collective.one_shot_all_reduce_threshold_bytes": 1 << 30}
_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def build(name: Name, context: BenchContext) -> Program:
    """Raises ConfigError for a program that cannot run here or is none, and whatever a builder raises."""
    if name.base in ours.BUILDERS:
        return ours.BUILDERS[name.base](context)
    built = _function(name.base)(context)
    if isinstance(built, tuple) and len(built) == 2:
        built = Target(program=built[0], inputs=built[1])
    if not isinstance(built, Target):
        kind = type(built).__name__
        raise ConfigError(f"--program {name.text} returned {kind}; return a tpcompile.Target or (program, inputs)")
    return built if isinstance(built, Program) else Program(**vars(built))


def _function(base: str) -> Callable[[BenchContext], Any]:
    """`FILE:FUNCTION` or `package.module:function` -> the function. Raises ConfigError when there is none."""
    place, _, name = base.partition(":")
    module = place
    if place.endswith(".py"):
        sys.path.insert(0, str(Path(place).parent.absolute()))  # as for `python FILE`: it can import its neighbours
        module = Path(place).stem
    function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ConfigError(f"--program {base}: {place} has no function {name}")
    return function


def compiled_call(name: Name, context: BenchContext, program: Program) -> Call:
    """A call of the program that the name asks for; its first call compiles."""
    called: Any = program.program
    if name.base != "eager" and not program.is_compiled:
        called = torch.compile(called, **_compile_options(name, context))
    is_whole_step = program.step is not None or program.reference is not None
    if context.cotangent is None or is_whole_step:
        call = forward_call(called, program)
    else:
        call = training_call(called, program, context.cotangent)

    def within() -> Results:
        with program.around():
            return call()

    return _profiled(name, context, within, "max-autotune") if AUTOTUNED in name.variants else within


def captured(name: Name, context: BenchContext, plain: Call) -> Call:
    """The warm program; as one CUDA graph where the name asks for it, captured here."""
    if GRAPHED not in name.variants:
        return plain
    graphed = _profiled(name, context, plain, "graphed")
    graphed()
    return graphed


def notes_of(name: Name, context: BenchContext, program: Program) -> tuple[str, ...]:
    """The notes of the program, and with `by-size` the table that is used."""
    by_size = sums(_all_reduce(name))
    return program.notes if by_size is None else (*program.notes, by_size.text(context.group))


def _all_reduce(name: Name) -> Any:
    return "by_size" if BY_SIZE in name.variants else "nccl"


def _profiled(name: Name, context: BenchContext, call: Call, profile: Profile) -> Profiled:
    """The same for ours and for peers; the call compiles what it calls, and reads its inputs where they are."""
    return run(
        call,
        profile,
        group=context.group,
        is_compiled=True,
        timeout_s=context.config.gate.store_timeout_s,
        all_reduce=_all_reduce(name),
        name=name.text,
    )


def _compile_options(name: Name, context: BenchContext) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if AUTOTUNED in name.variants:
        options |= TUNED | {"compile_threads": int(os.environ[_THREADS])}
    if ONE_SHOT in name.variants:
        options |= _ONE_SHOT
        symmetric.enable(context.group)
    by_size = sums(_all_reduce(name))
    if by_size is not None:
        options |= by_size.options
    found = {"backend": context.config.compile.backend, "dynamic": context.config.compile.dynamic}
    return found | ({"options": options} if options else {})
