"""A name and what all programs are given -> the program of this rank, compiled and captured as its variants say.

The block that ships: eager, modes A, B and C, with fast paths, or without communication; or a user's program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpcompile.bench.contract import BenchContext, Program
from tpcompile.bench.names import AUTOTUNED, BY_SIZE, GRAPHED, ONE_SHOT, Name
from tpcompile.by_size import sums
from tpcompile.choices import AllReduce, Profile
from tpcompile.collectives.api import Dst
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives, TpComm
from tpcompile.config import load_target
from tpcompile.errors import ConfigError
from tpcompile.fastpath import Selection, tp_region
from tpcompile.gate import reference
from tpcompile.nn.fast_paths import check_exchanges, use_fast_paths
from tpcompile.nn.state import local_slices_of
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


class IdentityCollectives(Collectives):
    """What mode C computes, without what it sends: tensors of the right shapes, wrong numbers."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """`x` itself."""
        return x

    def copy_to_tp(self, x: Tensor) -> Tensor:
        """`x` itself, forward and backward."""
        return x

    def all_gather(self, x: Tensor, dim: int, dst: Dst = "R") -> Tensor:
        """This rank's part, once for each rank."""
        return torch.cat([x] * self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """The first part."""
        return x.chunk(self.size, dim)[0]


STRATEGIES = {
    "eager": Collectives, "A": DisabledCollectives, "B": InPlaceCollectives, "C": Collectives,
    "C+fast": Collectives, "C+fast-all": Collectives, "compute": IdentityCollectives,
}  # fmt: skip
"""Base of a name -> its collectives."""


def build(name: Name, context: BenchContext) -> Program:
    """Raises ConfigError for a program that cannot run here or is none, and whatever a builder raises.

    A program with fast paths cannot run where no place of the block has one that can.
    """
    if name.base in STRATEGIES:
        program = stack_of(context, STRATEGIES[name.base](context.group))
        if "+fast" in name.base:
            program = _with_fast_paths(program, context, ask_table=name.base == "C+fast")
        return program
    module, _, function = name.base.partition(":")
    if module.endswith(".py"):
        sys.path.insert(0, str(Path(module).parent.absolute()))  # as for `python FILE`: it can import its neighbours
        module = Path(module).stem
    config = load_target(f"{module}:{function}")
    make = find(config)
    built = target_of(config, make(context))
    return built if isinstance(built, Program) else Program(**vars(built))


def stack_of(context: BenchContext, comm: TpComm) -> Program:
    """This rank's stack, with its slices of the weights."""
    stack = reference.build(context.config.block, comm, context.weights, context.device)
    return Program(
        program=stack,
        inputs=context.inputs,
        slice_of=lambda name, full: local_slices_of({name: full}, module=stack)[name],
        around=partial(tp_region, context.world_size),
    )


def _with_fast_paths(program: Program, context: BenchContext, *, ask_table: bool) -> Program:
    stack, config = program.program, context.config
    limit_s = config.gate.store_timeout_s
    decisions = use_fast_paths(
        stack,
        Selection(context.group, ask_table=ask_table, timeout_s=limit_s),
        batch=config.block.batch,
        seq_len=config.block.seq_len,
        train=config.train,
        wait_s=limit_s,  # each rank compiles by itself, so that one can be this late
    )
    used = [path for path, decision in decisions.items() if decision.is_used]
    if not used:
        reasons = "; ".join(f"{path}: {decision.why}" for path, decision in decisions.items())
        raise ConfigError(f"no fast path is used here: {reasons or 'the block has no place for one'}")
    return replace(program, check=partial(check_exchanges, stack), notes=(f"fast paths: {', '.join(used)}",))


class Forms:
    """A program as its name asks for it: as a call, compiled, and captured."""

    def __init__(self, name: Name, context: BenchContext, program: Program) -> None:
        self._name, self._context, self._program = name, context, program
        self._all_reduce: AllReduce = "by_size" if BY_SIZE in name.variants else "nccl"
        self._by_size = sums(self._all_reduce, context.group, timeout_s=context.config.gate.store_timeout_s)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of the program, and with `by-size` the table that is used."""
        of_sums = () if self._by_size is None else (self._by_size.text(self._context.group),)
        return (*self._program.notes, *of_sums)

    def plain(self) -> Call:
        """A call of the program; its first call compiles."""
        is_autotuned = AUTOTUNED in self._name.variants
        options: dict[str, Any] = {}
        if is_autotuned:
            options |= TUNED | {"compile_threads": int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])}
        if ONE_SHOT in self._name.variants:
            options |= _ONE_SHOT
            symmetric.enable(self._context.group)
        if self._by_size is not None:
            options |= self._by_size.options
        called: Any = self._program.program
        is_left_alone = self._name.base == "eager" or self._program.is_compiled
        if not is_left_alone:
            settings = self._context.config.compile
            called = torch.compile(called, backend=settings.backend, dynamic=settings.dynamic, options=options or None)
        call = call_of(called, self._program, self._context.cotangent)
        return self._profiled(call, "max-autotune") if is_autotuned else call

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
