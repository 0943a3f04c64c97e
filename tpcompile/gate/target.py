"""The user's own program, run phase by phase as mode C is -> facts of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.choices import TARGET
from tpcompile.config import TargetConfig
from tpcompile.errors import ConfigError
from tpcompile.fastpath import tp_region
from tpcompile.gate import outputs
from tpcompile.gate.checks import FIRST, RESIZED
from tpcompile.gate.compiled import find_wrong_code
from tpcompile.gate.measurements import Declared
from tpcompile.gate.on_one_rank import built_for_one_rank
from tpcompile.gate.phases import RESIZED_CALLS, Phases
from tpcompile.gate.step_values import Ran, comparable, run_step, spread_of
from tpcompile.numerics import error_ratio, spread
from tpcompile.numerics.drawn import Drawn
from tpcompile.numerics.optimizer_step import buffers_put_back, followed
from tpcompile.numerics.trace import Axis
from tpcompile.numerics.wrong_op import Run, wrong_op_of
from tpcompile.ranks.domain import Domain, domain_of
from tpcompile.target import Inputs, Target, TargetError, call_target, copied

BUILD = f"{TARGET}/build"
"""The phase in which a target is imported and built."""


def declared(config: TargetConfig, target: Target, mesh: DeviceMesh) -> tuple[TargetConfig, Domain]:
    """The configuration with what the target declares, and the ranks that must agree with this one.

    `mesh` is used when the target has no mesh. Raises TargetError for an axis that the mesh does not have, and for an
    entry of `allow` that is not a (layer, text, reason).
    """
    try:
        domain = domain_of(target.mesh or mesh, target.axis)
        return config.declaring(allow=target.allow, tp_aware=target.tp_aware), domain
    except ConfigError as error:
        raise TargetError(f"--target {config.target}: {error}") from None


def run_target(phases: Phases, target: Target, group: dist.ProcessGroup) -> None:
    """Run all phases of the target among the ranks of its axis; the measurements are in `phases.facts`."""
    facts = Declared(
        num_graphs=target.num_graphs,
        has_resized=target.resized is not None,
        has_reference=target.reference is not None,
    )
    phases.facts = phases.facts.changed(declared=facts)
    program = target.program if target.is_compiled else phases.compile(target.program)

    def call(inputs: Inputs, *, around: AbstractContextManager[Any] | None = None) -> Any:
        phases.session.count_call()
        with tp_region(group.size()), around or nullcontext():
            result = call_target(target, program, inputs)
        phases.finish_device()
        return result

    has_reference = target.reference is not None
    if has_reference:
        phases.facts = phases.facts.changed(inputs=outputs.values_of(target.inputs))

    def trains(changes: bool) -> bool:
        return phases.ranks.any_says(f"{TARGET}/trains", changes)

    with phases.phase(f"{TARGET}/{FIRST}", "compile and run"):
        compiled = _ran(target, call, trains=trains) if has_reference else Ran({})
        if not has_reference:
            call(target.inputs)
    with _put_back(target) if has_reference else nullcontext():
        _call_again(phases, target, call)
    if has_reference:
        call_eager = partial(call, around=torch.compiler.set_stance("force_eager"))
        with phases.phase(f"{TARGET}/eager", "the same without compile"):
            eager = _ran(target, call_eager, trains=lambda _changes: compiled.trains)
        again = partial(_ran, target, call, trains=lambda _changes: compiled.trains)
        _compare(phases, target, compiled, eager, group, again=again)


def _ran(target: Target, call: Callable[[Inputs], Any], *, trains: Callable[[bool], bool]) -> Ran:
    outputs.forget_gradients(target.program, target.inputs)  # a step that does not zero them adds to those of the last
    return run_step(target, target.program, lambda: call(target.inputs), trains=trains)


def _put_back(target: Target) -> AbstractContextManager[Any]:
    """Buffers are as before afterwards, and where a step may change them, weights and optimizers."""
    module = target.program if isinstance(target.program, nn.Module) else None
    return buffers_put_back(module) if target.step is None else followed(module)


def _call_again(phases: Phases, target: Target, call: Callable[[Inputs], Any]) -> None:
    phases.steady(TARGET, lambda: call(target.inputs))
    if target.resized is not None:
        with phases.phase(f"{TARGET}/{RESIZED}", "a different length"):
            for _ in range(RESIZED_CALLS):
                call(target.resized)


def _compare(
    phases: Phases,
    target: Target,
    compiled: Ran,
    eager: Ran,
    group: dist.ProcessGroup,
    *,
    again: Callable[[], Ran],
) -> None:
    """Compare both runs with the reference; what is wrong in eager, or only where it is compiled, is searched for."""
    drawn = Drawn()
    single, exact = (ran() for ran, _module in _alone(target, drawn, trains=eager.trains))
    phases.facts = phases.facts.changed(reference=outputs.norms(exact.named))
    found = comparable([compiled, eager], single, exact, rank=group.rank(), size=group.size())
    compiled_values, eager_values = found.own
    limit, normal = phases.config.gate.error_ratio, dict(found.normal)
    coarsest = drawn.coarsest
    errors = outputs.errors(compiled_values, eager_values, found.single, found.exact, normal, coarsest=coarsest)
    if phases.ranks.any_says(f"{TARGET}/red", bool(outputs.beyond(errors, limit))):
        normal = spread_of(_moved_runs(target, trains=eager.trains), exact.named, normal)
        errors = outputs.errors(compiled_values, eager_values, found.single, found.exact, normal, coarsest=coarsest)
    phases.facts = phases.facts.with_errors(TARGET, errors).changed(left_out=found.left_out)
    without_compile = outputs.errors(eager_values, eager_values, found.single, found.exact, normal)
    wrong = [name for name in outputs.beyond(without_compile, limit) if name in eager_values]
    _find_first_wrong(phases, target, wrong, group, drawn, trains=eager.trains)

    def is_like_eager(ran: Ran) -> bool:
        both = comparable([ran, eager], single, exact, rank=group.rank(), size=group.size())
        mine, theirs = both.own
        apart = outputs.errors(mine, theirs, both.single, both.exact, normal)
        return not any(name.startswith("eager ") for name in outputs.beyond(apart, limit))

    find_wrong_code(
        phases, TARGET, again, is_like_eager, differs=not is_like_eager(compiled), eager_is_wrong=bool(wrong)
    )


def _moved_runs(target: Target, *, trains: bool) -> Iterator[outputs.Outputs]:
    """What the reference returns where its weights and inputs are moved by one unit in the last place."""
    for seed in range(spread.NUM_RUNS):
        module = copied(target.reference, "the reference")
        assert module is not None, "without a reference nothing is measured"
        spread.move_weights(module, seed=seed)
        yield _run_alone(target, module, spread.moved_inputs(target.inputs, seed=seed), trains=trains).named


def _alone(target: Target, drawn: Drawn, *, trains: bool) -> list[tuple[Callable[[], Ran], nn.Module]]:
    """Calls of the reference of a target, in its own dtype and in float64; each returns what is compared.

    The second one draws what the first one did.
    """
    reference = target.reference
    assert reference is not None, "without a reference nothing is measured"
    exactly = copied(reference, "the reference").double()
    exact_inputs = error_ratio.cast(target.inputs, torch.float64)

    def run(drawing: Callable[[], AbstractContextManager[Any]], module: nn.Module, inputs: Inputs) -> Ran:
        with drawing():
            return _run_alone(target, module, inputs, trains=trains)

    run_single = partial(run, drawn.recorded, reference, target.inputs)
    return [(run_single, reference), (partial(run, drawn.exactly, exactly, exact_inputs), exactly)]


def _run_alone(target: Target, module: nn.Module, inputs: Inputs, *, trains: bool) -> Ran:
    # A step that reads gradients of the target's inputs, not of what it is given, gets None.
    outputs.forget_gradients(module, target.inputs, inputs)
    with nullcontext() if target.step else torch.no_grad():
        run = partial(call_target, target, module, inputs)
        return run_step(target, module, run, trains=lambda _changes: trains)


def on_one_device(target: Target) -> tuple[outputs.Outputs, outputs.Outputs]:
    """What the reference of a target returns, in its own dtype and in float64; a step's changes are put back."""
    single, exact = (run().returned for run, _module in _alone(target, Drawn(), trains=False))
    return single, exact


def _find_first_wrong(
    phases: Phases, target: Target, wrong: Sequence[str], group: dist.ProcessGroup, drawn: Drawn, *, trains: bool
) -> None:
    """When some rank is wrong in eager, all ranks look for the op that it begins with: the search communicates."""
    if not phases.ranks.any_says(f"{TARGET}/wrong", bool(wrong)):
        return
    module = target.program if isinstance(target.program, nn.Module) else None

    def call() -> dict[str, Tensor]:
        outputs.forget_gradients(target.program, target.inputs)
        with tp_region(group.size()), torch.compiler.set_stance("force_eager"):
            run = partial(call_target, target, target.program, target.inputs)
            return run_step(target, target.program, run, trains=lambda _changes: trains).named

    alone = [Run(partial(_named, run), module) for run, module in _alone(target, drawn, trains=trains)]
    parameters = [] if target.reference is None else target.reference.parameters()
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
    on_one_rank = partial(_on_one_rank, phases, target, trains=trains)
    with phases.phase(f"{TARGET}/localise", "find the first wrong op"), phases.ranks.last_state.not_followed():
        found = wrong_op_of(
            Run(call, module),
            alone,
            wrong,
            group,
            dtype=coarsest,
            device=phases.device,
            on_one_rank=on_one_rank,
            axes=_other_axes(target),
        )
    if wrong:
        phases.facts = phases.facts.changed(first_wrong_op=found)


def _other_axes(target: Target) -> list[Axis]:
    """The axes of the target's own mesh along which its ranks need not agree, with this rank's place."""
    mesh = target.mesh
    if mesh is None:
        return []
    others = [name for name in mesh.mesh_dim_names or () if name != target.axis]
    return [Axis(mesh[name].size(), mesh.get_local_rank(name), mesh.get_group(name)) for name in others]


@contextmanager
def _on_one_rank(phases: Phases, target: Target, *, trains: bool) -> Iterator[Run | None]:
    """A run of the program that is built for one rank, by the step that is built with it, in eager; None where it
    cannot be built so."""
    reference = target.reference
    assert isinstance(phases.config, TargetConfig) and reference is not None, "a target is compared"
    with built_for_one_rank(phases.config, phases.device, reference) as alone:
        if alone is None:
            yield None
            return
        own = replace(target, step=target.step and alone.step)

        def call() -> dict[str, Tensor]:
            with torch.compiler.set_stance("force_eager"):
                return _run_alone(own, alone.program, target.inputs, trains=trains).named

        yield Run(call, alone.program)


def _named(run: Callable[[], Ran]) -> dict[str, Tensor]:
    return run().named
