"""`package.module:build` -> a program of the user's own, run phase by phase as mode C is -> facts of this rank."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

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
from tpcompile.gate.measurements import Declared
from tpcompile.gate.phases import RESIZED_CALLS, Phases
from tpcompile.numerics import measure
from tpcompile.ranks.domain import Domain, domain_of

BUILD = f"{TARGET}/build"
"""The phase in which a target is imported and built."""

Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
"""One tensor, positional arguments, or keyword arguments."""


@dataclass(frozen=True, kw_only=True)
class TargetContext:
    """What `build` is given."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    """All ranks on one axis, `tp`. A target that needs more axes makes its own mesh and returns it in `Target.mesh`."""
    settings: Mapping[str, Any]
    """`--set key=value` of the command line."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The user's own program, as the gate runs it; `build` returns a Target, or (program, inputs).

        def build(ctx):
            model = parallelize(Model().to(ctx.device), ctx.mesh)
            return Target(program=model, inputs=(tokens,), resized=(tokens[:, :-4],))

    The gate compiles and calls it, calls it again with equal inputs, once more with `resized` inputs, and in eager.
    All ranks must build alike.
    """

    program: Any
    """A module or function; compiled by the gate unless `is_compiled`."""
    inputs: Inputs
    """Its arguments on this rank."""
    resized: Inputs | None = None
    """Arguments in which one size differs; None leaves that phase out."""
    step: Callable[[Any, Inputs], Any] | None = None
    """Called as `step(program, inputs)` in place of the program: a train step, for example."""
    reference: nn.Module | None = None
    """The same program with the same full weights on one device, called with the same inputs. Both are compared with
    the reference in float64: the error of the program may be at most 2.5 times that of the reference in its own dtype.
    With a reference, `step` must not change the weights, and must return what is to be compared: a loss, gradients."""
    num_graphs: int | None = 1
    """Graphs that the first call compiles; None for any number."""
    is_compiled: bool = False
    """The program calls torch.compile itself, on all of it or on parts."""
    mesh: DeviceMesh | None = None
    """The mesh of the ranks; by default `ctx.mesh`."""
    axis: str = "tp"
    """The ranks of one group of this axis must agree; groups are compared apart."""
    allowed: Sequence[tuple[str, str, str]] = ()
    """Intended differences between ranks, (layer, text, reason)."""
    tp_aware: Sequence[str] = ()
    """Names of custom ops, kernels, passes and backends that are right on a shard."""


class TargetError(ConfigError):
    """The module or function that `--target` names does not exist, or the target that it returns is invalid."""


def find(config: TargetConfig) -> Callable[[TargetContext], Any]:
    """Import the function that the configuration names; an exception of the module's own code passes through.

    Raises TargetError when there is no such module or function.
    """
    name, _, function = config.target.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the target imports
        raise TargetError(f"--target {config.target}: there is no module {error.name} here") from None
    found = getattr(module, function, None)
    if not callable(found):
        raise TargetError(f"--target {config.target}: {name} has no function {function}")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise TargetError(f"--target {config.target}: it is called as {function}(ctx): {error}") from None
    except ValueError:  # a callable in C: no signature to read
        pass
    return found


def target_of(config: TargetConfig, built: Any) -> Target:
    """Make a Target of what the function returned. Raises TargetError when that is not possible."""
    if isinstance(built, tuple) and len(built) == 2:
        built = Target(program=built[0], inputs=built[1])
    if not isinstance(built, Target):
        raise TargetError(
            f"--target {config.target} returned {type(built).__name__}; return a tpcompile.Target or (program, inputs)"
        )
    for name, (is_right, wanted) in _KINDS.items():
        value = getattr(built, name)
        if not is_right(value):
            raise TargetError(f"--target {config.target}: {name} is {type(value).__name__}; it must be {wanted}")
    if not dist.is_initialized():
        raise TargetError(f"--target {config.target} destroyed the process group; the gate needs it")
    return built


def _is_inputs(value: object) -> bool:
    is_several = isinstance(value, (Sequence, Mapping)) and not isinstance(value, (str, bytes))
    return isinstance(value, Tensor) or is_several


def _is_none_or(kind: type) -> Callable[[object], bool]:
    return lambda value: value is None or isinstance(value, kind)


_INPUTS = "a tensor, a tuple of arguments or a dict of keyword arguments"
_KINDS: dict[str, tuple[Callable[[object], bool], str]] = {
    "program": (callable, "a module or a function"),
    "inputs": (_is_inputs, _INPUTS),
    "resized": (lambda value: value is None or _is_inputs(value), f"{_INPUTS}, or None"),
    "step": (lambda value: value is None or callable(value), "a function of (program, inputs), or None"),
    "reference": (_is_none_or(nn.Module), "a module, or None"),
    "num_graphs": (_is_none_or(int), "a number, or None"),
    "mesh": (_is_none_or(DeviceMesh), "a DeviceMesh, or None"),
    "axis": (lambda value: isinstance(value, str), "the name of an axis"),
}
"""Field of a `Target` -> whether a value is valid, and which values are."""


def declared(config: TargetConfig, target: Target, mesh: DeviceMesh) -> tuple[TargetConfig, Domain]:
    """The configuration with what the target declares, and the ranks that must agree with this one.

    `mesh` is used when the target has no mesh. Raises TargetError for an axis that the mesh does not have, and for an
    entry of `allowed` that is not a (layer, text, reason).
    """
    try:
        domain = domain_of(target.mesh or mesh, target.axis)
        return config.declaring(allow=target.allowed, tp_aware=target.tp_aware), domain
    except ConfigError as error:
        raise TargetError(f"--target {config.target}: {error}") from None


def run(phases: Phases, target: Target, *, tp_size: int) -> None:
    """Run all phases of the target; the measurements are in `phases.facts`."""
    facts = Declared(
        num_graphs=target.num_graphs,
        has_resized=target.resized is not None,
        has_reference=target.reference is not None,
    )
    phases.facts = phases.facts.changed(declared=facts)
    program = target.program if target.is_compiled else phases.compile(target.program)

    def call(inputs: Inputs, *, around: AbstractContextManager[Any] | None = None) -> Any:
        phases.session.count_call()
        with tp_region(tp_size), around or nullcontext():
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
        _keep_errors(phases, target, compiled, eager)


def call_target(target: Target, program: Any, inputs: Inputs) -> Any:
    """Call the compiled program as the target says: its step, or the program with its inputs."""
    if target.step is not None:
        return target.step(program, inputs)
    if isinstance(inputs, Tensor):
        return program(inputs)
    if isinstance(inputs, Mapping):
        return program(**inputs)
    return program(*inputs)


def _keep_errors(phases: Phases, target: Target, compiled: outputs.Outputs, eager: outputs.Outputs) -> None:
    """Errors against the reference in float64, beside those of the reference in its own dtype."""
    single, exact = on_one_device(target)
    facts = phases.facts.changed(reference=outputs.norms(exact))
    phases.facts = facts.with_errors(TARGET, outputs.errors(compiled, eager, single, exact))


def on_one_device(target: Target) -> tuple[outputs.Outputs, outputs.Outputs]:
    """What the reference of a target returns, in its own dtype and in float64."""
    reference = target.reference
    assert reference is not None, "without a reference nothing is measured"
    exactly = copy.deepcopy(reference).double()
    outputs.forget_gradients(reference, exactly, target.inputs)
    with nullcontext() if target.step else torch.no_grad():
        single = outputs.kept(call_target(target, reference, target.inputs))
        outputs.forget_gradients(target.inputs)  # a step that reads them there, not from what it is given, gets None
        exact = outputs.kept(call_target(target, exactly, measure.cast(target.inputs, torch.float64)))
    return single, exact
