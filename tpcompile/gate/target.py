"""The user's own program, run phase by phase as mode C is -> facts of this rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
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
from tpcompile.gate.phases import RESIZED_CALLS, Phases
from tpcompile.numerics import error_ratio
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
        outputs.forget_gradients(target.program, target.inputs)
        phases.facts = phases.facts.changed(inputs=outputs.values_of(target.inputs))
    with phases.phase(f"{TARGET}/{FIRST}", "compile and run"):
        first = call(target.inputs)
    compiled = outputs.kept(first) if has_reference else {}
    phases.steady(TARGET, lambda: call(target.inputs))
    if target.resized is not None:
        with phases.phase(f"{TARGET}/{RESIZED}", "a different length"):
            for _ in range(RESIZED_CALLS):
                call(target.resized)
    if has_reference:
        outputs.forget_gradients(target.program, target.inputs)
        with phases.phase(f"{TARGET}/eager", "the same without compile"):
            eager = outputs.kept(call(target.inputs, around=torch.compiler.set_stance("force_eager")))
        single, exact = on_one_device(target)
        phases.facts = phases.facts.changed(reference=outputs.norms(exact))
        phases.facts = phases.facts.with_errors(TARGET, outputs.errors(compiled, eager, single, exact))
        wrong = outputs.wrong_names(eager, single, exact, limit=phases.config.gate.error_ratio)
        _find_first_wrong(phases, target, wrong, group)

        def again() -> outputs.Outputs:
            outputs.forget_gradients(target.program, target.inputs)
            return outputs.kept(call(target.inputs))

        def apart(result: outputs.Outputs) -> bool:
            return bool(outputs.unlike_eager(result, eager, single, exact, limit=phases.config.gate.error_ratio))

        find_wrong_code(
            phases, TARGET, again, lambda result: not apart(result), differs=apart(compiled), eager_is_wrong=bool(wrong)
        )


def runs_alone(target: Target) -> list[Run]:
    """Calls of the reference of a target, in its own dtype and in float64; each returns what is compared."""
    reference = target.reference
    assert reference is not None, "without a reference nothing is measured"
    exactly = copied(reference, "the reference").double()
    exact_inputs = error_ratio.cast(target.inputs, torch.float64)

    def call(module: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
        # A step that reads gradients of the target's inputs, not of what it is given, gets None.
        outputs.forget_gradients(module, target.inputs, inputs)
        with nullcontext() if target.step else torch.no_grad():
            return outputs.kept(call_target(target, module, inputs))

    given = ((reference, target.inputs), (exactly, exact_inputs))
    return [Run(partial(call, module, inputs), module) for module, inputs in given]


def on_one_device(target: Target) -> tuple[outputs.Outputs, outputs.Outputs]:
    """What the reference of a target returns, in its own dtype and in float64."""
    single, exact = (run.call() for run in runs_alone(target))
    return single, exact


def _find_first_wrong(phases: Phases, target: Target, wrong: Sequence[str], group: dist.ProcessGroup) -> None:
    """When some rank is wrong in eager, all ranks look for the op that it begins with: the search communicates."""
    if not phases.ranks.any_says(f"{TARGET}/wrong", bool(wrong)):
        return
    module = target.program if isinstance(target.program, nn.Module) else None

    def call() -> dict[str, Tensor]:
        outputs.forget_gradients(target.program, target.inputs)
        with tp_region(group.size()), torch.compiler.set_stance("force_eager"):
            return outputs.kept(call_target(target, target.program, target.inputs))

    alone, dtype = runs_alone(target), _coarsest(target.reference)
    with phases.phase(f"{TARGET}/localise", "find the first wrong op"):
        found = wrong_op_of(Run(call, module), alone, wrong, group, dtype=dtype, device=phases.device)
    if wrong:
        phases.facts = phases.facts.changed(first_wrong_op=found)


def _coarsest(module: nn.Module | None) -> torch.dtype:
    """The dtype with the largest rounding among the parameters."""
    parameters = [] if module is None else module.parameters()
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
