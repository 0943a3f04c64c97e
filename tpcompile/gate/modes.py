"""What modes A, B and C run, phase by phase -> facts of this rank."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.by_size import Table, sums
from tpcompile.choices import AllReduce, Mode
from tpcompile.collectives.strategies import Collectives, DisabledCollectives, InPlaceCollectives, TpComm
from tpcompile.config import RunConfig
from tpcompile.fastpath import Selection, tp_region
from tpcompile.gate.checks import FIRST, RESIZED, STEADY
from tpcompile.gate.compiled import find_wrong_code
from tpcompile.gate.faults import Fault, FaultContext
from tpcompile.gate.measurements import GradientFactor, GraphBreaks, Schedule
from tpcompile.gate.outputs import beyond
from tpcompile.gate.phases import RESIZED_CALLS, Phases
from tpcompile.gate.profiled import ProfiledStep, replay_errors
from tpcompile.gate.reference import Result, StackReference, build, call_once
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.fast_paths import check_exchanges, use_fast_paths
from tpcompile.numerics.counting import collective_text
from tpcompile.profiles.callables import options_of


@dataclass
class Run(Phases):
    """The phases of the gate's own block, with the group, reference and fault that every mode needs."""

    config: RunConfig
    group: dist.ProcessGroup
    reference: StackReference
    fault: Fault
    context: FaultContext

    def faulty(self, name: str) -> Callable[[], object]:
        """A function that runs the injected fault, for use ahead of a phase."""
        return lambda: self.fault.phase(name, self.context)

    def call(self, program: Any, stack: TransformerStack, inputs: BlockInputs | None = None) -> Result:
        """Call the program once on `inputs`, by default the reference's, with a backward pass when training."""
        given = inputs or self.reference.inputs()
        return self.counted(lambda: call_once(self.reference, program, stack, given))

    def counted(self, call: Callable[[], Result]) -> Result:
        """One call of the program on a shard; returns when the device is done."""
        self.session.count_call()
        with tp_region(self.group.size()):
            result = call()
        self.finish_device()
        return result

    def compile_for_profile(self, program: Any) -> Any:
        """torch.compile as configured, with what the profile of the run and the sums ask of Inductor."""
        if self.config.compile.backend != "inductor":
            return self.compile(program)
        found = sums(self.all_reduce, self.group, timeout_s=self.config.gate.store_timeout_s)
        return self.compile(program, options=options_of(self.config.profile, found))

    @property
    def all_reduce(self) -> AllReduce | Table:
        """How its graphs sum over ranks; the fault may have one rank do it differently."""
        return self.fault.all_reduce(self.config.compile.all_reduce, self.context)

    def profiled(self, program: Any, stack: TransformerStack) -> ProfiledStep:
        """The program under the profile of the run; the fault may have one rank take a different one."""
        profile = self.fault.profile(self.config.profile, self.context)
        timeout_s = self.config.gate.store_timeout_s
        return ProfiledStep(
            program, stack, self.reference,
            profile=profile, all_reduce=self.all_reduce, group=self.group, timeout_s=timeout_s,
        )  # fmt: skip

    def build(self, comm: TpComm) -> TransformerStack:
        """This rank's stack."""
        return build(self.config.block, comm, self.reference.full, self.device)

    def choose_fast_paths(self, stack: TransformerStack) -> None:
        """Decide with all ranks, for each place in the stack, between a fast path and its reference."""
        block, wanted = self.config.block, self.config.compile.fast_paths
        if wanted == "off":
            return
        selection = Selection(self.group, ask_table=wanted == "measured", timeout_s=self.config.gate.store_timeout_s)
        use_fast_paths(stack, selection, batch=block.batch, seq_len=block.seq_len, train=self.config.train)

    def steady_calls(self, mode: Mode, program: Any, stack: TransformerStack, **options: Any) -> None:
        """The steady calls of a mode, all on the same inputs."""
        inputs = self.reference.inputs()
        self.steady(mode, lambda: self.call(program, stack, inputs), **options)


def mode_c(run: Run) -> None:
    """Functional collectives, which must give one graph on every rank, equal digests and right numbers."""
    fault, context, config = run.fault, run.context, run.config
    stack = run.build(fault.comm(Collectives(run.group), context))
    run.choose_fast_paths(stack)
    program = fault.program(stack, context)
    step = run.profiled(fault.compile(program, context, run.compile_for_profile), stack)
    inputs = run.reference.inputs()
    with run.phase(f"C/{FIRST}", "compile and run", before=run.faulty(f"C/{FIRST}")):
        first = run.counted(lambda: step(inputs))
    _keep_errors(run, "C", stack, first)
    run.steady("C", lambda: run.counted(lambda: step(inputs)), before=run.faulty(f"C/{STEADY}"))
    with run.phase(f"C/{RESIZED}", f"{config.resized_seq_len} tokens", before=run.faulty(f"C/{RESIZED}")):
        for _ in range(RESIZED_CALLS):
            run.counted(lambda: step(run.reference.inputs(config.resized_seq_len)))
    with run.phase("C/eager", "the same without compile"):
        eager = run.call(program, stack)
        _compare_replays(run, step, stack)
    apart = run.reference.difference(stack, first, eager)
    run.facts = run.facts.with_errors("C", {f"eager {name}": value for name, value in apart.items()})
    differs = bool(beyond(apart, config.gate.error_ratio))
    _find_wrong_code(run, step, stack, eager, differs=differs)
    step.close()
    check_exchanges(stack)
    _keep_schedule(run, stack)
    _find_first_wrong(run, stack)


def mode_b(run: Run) -> None:
    """In-place all-reduce, traced: one graph and a right forward, but gradients are multiplied by the world size."""
    stack = run.build(InPlaceCollectives(run.group))
    compiled = run.compile(stack)
    with run.phase(f"B/{FIRST}", "compile and run"):
        first = run.call(compiled, stack)
    _keep_errors(run, "B", stack, first, only_forward=True)
    run.steady_calls("B", compiled, stack)
    with run.phase("B/gradient", "gradient of an in-place all_reduce"):
        eager = _gradient_factor(_in_place_sum(run.group), run.device)
        traced = torch.compile(_in_place_sum(run.group), backend="aot_eager")
        run.facts = run.facts.changed(
            gradient_factor=GradientFactor(eager=eager, compiled=_gradient_factor(traced, run.device))
        )


def mode_a(run: Run) -> None:
    """In-place all-reduce hidden from Dynamo: the graph breaks at every collective."""
    warnings.filterwarnings("ignore", message=".*autograd kernel was not registered.*")  # that is what mode A does
    recorder = SiteRecorder(DisabledCollectives(run.group))
    with run.phase("A/eager", "find the call sites"), torch.no_grad():
        run.build(recorder)(*run.reference.inputs())
    stack = run.build(DisabledCollectives(run.group))
    compiled = run.compile(stack)
    with run.phase(f"A/{FIRST}", "compile and run"):
        run.call(compiled, stack)
    with run.phase("A/count", "count the regions"):
        run.call(compiled, stack)
    breaks = [b for c in run.session.compiles() if c.phase == f"A/{FIRST}" for b in c.breaks]
    found = GraphBreaks(
        sites=tuple(sorted(set(recorder.sites))),
        collectives_per_forward=len(recorder.sites),
        broken_sites=tuple(sorted({f"{Path(s.file).name}:{s.line}" for b in breaks for s in b.stack})),
        regions_per_forward=sum(c.entered for c in run.session.region_counts() if c.phase == "A/count"),
    )
    run.facts = run.facts.changed(breaks=found)
    run.steady_calls("A", compiled, stack)


MODES: dict[Mode, Callable[[Run], None]] = {"A": mode_a, "B": mode_b, "C": mode_c}


class SiteRecorder(DisabledCollectives):
    """Records which line of the model issues each all-reduce."""

    def __init__(self, inner: DisabledCollectives) -> None:
        super().__init__(inner.group)
        self.sites: list[str] = []

    def all_reduce(self, x: Tensor, dst: Any = "I") -> Tensor:
        """Record the caller's line, then reduce."""
        if self.size > 1:
            frame = sys._getframe(1)
            self.sites.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return super().all_reduce(x, dst)


def _keep_errors(run: Run, mode: Mode, stack: TransformerStack, got: Result, *, only_forward: bool = False) -> None:
    found = run.reference.errors(stack, got, only_forward=only_forward)
    run.facts = run.facts.with_errors(mode, found)


def _compare_replays(run: Run, step: ProfiledStep, stack: TransformerStack) -> None:
    """Record how many calls were replays of CUDA graphs and, if any was, their errors against compiled calls."""
    if step.replays.captures:
        with tp_region(run.group.size()):
            errors = replay_errors(step, stack, run.reference)
        run.finish_device()
        run.facts = run.facts.with_errors("C", errors)
    run.facts = run.facts.changed(replays=step.replays)


def _find_first_wrong(run: Run, stack: TransformerStack) -> None:
    """When some rank's output is wrong, all ranks look for the module it begins in: the search issues collectives."""
    limit = run.config.gate.error_ratio
    worst = max((error.badness for error in run.facts.errors_in("C") if error.what == "forward"), default=0.0)
    is_wrong = worst > limit
    if run.ranks.any_says("C/wrong", is_wrong):
        with run.phase("C/localise", "find the first wrong module"):
            module, op = run.reference.first_wrong(stack, Collectives(run.group), limit=limit)
        if is_wrong:
            run.facts = run.facts.changed(first_wrong=module or "the program around the stack", first_wrong_op=op)


def _find_wrong_code(run: Run, step: ProfiledStep, stack: TransformerStack, eager: Result, *, differs: bool) -> None:
    """When only compiled code is wrong, find the layer. A CUDA graph replays what was compiled: it is not searched."""
    if step.replays.captures:
        return

    def call() -> Result:
        return run.counted(lambda: step(run.reference.inputs()))

    limit = run.config.gate.error_ratio

    def is_right(result: Result) -> bool:
        return not beyond(run.reference.difference(stack, result, eager), limit)

    eager_is_wrong = bool(beyond(run.reference.errors(stack, eager, only_forward=not run.config.train), limit))
    find_wrong_code(run, "C", call, is_right, differs=differs, eager_is_wrong=eager_is_wrong)


def _keep_schedule(run: Run, stack: TransformerStack) -> None:
    block = run.config.block
    declared = stack.declared_collectives(
        block.batch, block.seq_len, block.dtype, run.config.train, context_len=block.context_len
    )
    first = [compile_ for compile_ in run.session.compiles() if compile_.phase == f"C/{FIRST}"]
    seen = [collective for compile_ in first for collective in compile_.collectives]
    schedule = Schedule(
        declared=tuple(map(collective_text, declared)),
        compiled=tuple(map(collective_text, seen)),
        lines=tuple(str(c.line) for c in seen),
    )
    run.facts = run.facts.changed(schedule=schedule)


def _in_place_sum(group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    def in_place_sum(x: Tensor) -> Tensor:
        y = x * 1.0
        dist.all_reduce(y, group=group)
        return y

    return in_place_sum


def _gradient_factor(function: Callable[[Tensor], Tensor], device: torch.device) -> float:
    x = torch.ones(4, device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # c10d warns in eager that autograd does not see this: that is the point
        function(x).sum().backward()
    assert x.grad is not None, "no gradient reached the input"
    return float(x.grad[0])
