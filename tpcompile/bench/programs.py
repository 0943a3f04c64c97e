"""A name and what all programs are given -> the program of this rank, compiled and captured as its variants say."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpcompile.bench import ours
from tpcompile.bench.contract import BenchContext, Program
from tpcompile.bench.names import AUTOTUNED, BY_SIZE, GRAPHED, ONE_SHOT, Name
from tpcompile.by_size import sums
from tpcompile.choices import AllReduce, Profile
from tpcompile.config import load_target
from tpcompile.errors import ConfigError
from tpcompile.profiles import TUNED, Profiled, run
from tpcompile.target import call_target, find, target_of
from tpcompile.torch_api import symmetric

_ONE_SHOT = {"_collective.auto_select": True, "_collective.one_shot_all_reduce_threshold_bytes": 1 << 30}


@dataclass
class Results:
    """The result of one call."""

    output: Any
    """A tensor, or what a user's `step` returns."""
    grads: dict[str, Tensor | None] | None = None
    """Gradients of the first input, `input`, and of parameters, by name; None without a backward pass of ours."""


Call = Callable[[], Results]


def build(name: Name, context: BenchContext) -> Program:
    """Raises ConfigError for a program that cannot run here or is none, and whatever a builder raises."""
    if name.base in ours.STRATEGIES:
        return ours.build(name.base, context)
    module, _, function = name.base.partition(":")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent.absolute()))  # as for `python FILE`: it can import its neighbours
        module = Path(module).stem
    config = load_target(f"{module}:{function}")
    make = find(config)
    built = target_of(config, make(context))
    return built if isinstance(built, Program) else Program(**vars(built))


class Forms:
    """A program as its name asks for it: as a call, compiled, and captured."""

    def __init__(self, name: Name, context: BenchContext, program: Program) -> None:
        self._name, self._context, self._program = name, context, program
        self._all_reduce: AllReduce = "by_size" if BY_SIZE in name.variants else "nccl"
        self._by_size = sums(self._all_reduce)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the program, and with `by-size` the table that is used."""
        of_sums = () if self._by_size is None else (self._by_size.text(self._context.group),)
        return (*self._program.notes, *of_sums)

    def plain(self) -> Call:
        """A call of the program; its first call compiles."""
        called: Any = self._program.program
        is_left_alone = self._name.base == "eager" or self._program.is_compiled
        if not is_left_alone:
            called = torch.compile(called, **self._compile_options())
        call = call_of(called, self._program, self._context.cotangent)
        return self._profiled(call, "max-autotune") if AUTOTUNED in self._name.variants else call

    def captured(self, plain: Call) -> Call:
        """The warm program; as one CUDA graph where the name asks for it, captured here."""
        if GRAPHED not in self._name.variants:
            return plain
        graphed = self._profiled(plain, "graphed")
        graphed()
        return graphed

    def _profiled(self, call: Call, profile: Profile) -> Profiled:
        """The same for ours and for peers; the call compiles what it calls, and reads its inputs where they are."""
        return run(
            call,
            profile,
            group=self._context.group,
            is_compiled=True,
            timeout_s=self._context.config.gate.store_timeout_s,
            all_reduce=self._all_reduce,
            name=self._name.text,
        )

    def _compile_options(self) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if AUTOTUNED in self._name.variants:
            options |= TUNED | {"compile_threads": int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])}
        if ONE_SHOT in self._name.variants:
            options |= _ONE_SHOT
            symmetric.enable(self._context.group)
        if self._by_size is not None:
            options |= self._by_size.options
        compile_ = self._context.config.compile
        return {"backend": compile_.backend, "dynamic": compile_.dynamic, "options": options or None}


def call_of(called: Any, program: Program, cotangent: Tensor | None) -> Call:
    """One call of the compiled program: forward, its own step, or with a cotangent forward and backward of the block.

    Gradients are not accumulated. Raises ConfigError for a backward pass from inputs by name: which of them gets a
    gradient is not known.
    """
    has_own = program.step is not None or program.reference is not None
    if cotangent is None or has_own:

        def forward() -> Results:
            with program.around(), nullcontext() if program.step is not None else torch.no_grad():
                return Results(call_target(program, called, program.inputs))

        return forward
    if isinstance(program.inputs, Mapping):
        raise ConfigError("with --train, give the inputs as a tuple, the activations first, or give a step")
    x, *rest = [program.inputs] if isinstance(program.inputs, Tensor) else program.inputs
    x = x.detach().clone().requires_grad_()
    named = {name: one for name, one in program.program.named_parameters() if one.requires_grad}

    def training() -> Results:
        with program.around():
            output = called(x, *rest)
            grads = torch.autograd.grad(output, [x, *named.values()], cotangent, allow_unused=True)
        return Results(output.detach(), dict(zip(["input", *named], grads, strict=True)))

    return training
