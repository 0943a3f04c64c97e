"""`package.module:build` -> a program of the user's own, as the gate and the fusion reports call it."""

from __future__ import annotations

import copy
import copyreg
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpcompile.config import TargetConfig, load_target
from tpcompile.errors import ConfigError, TargetRaised, TpCompileError

_Copied = TypeVar("_Copied")
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


class WatchedContext(TargetContext):
    """The same, for a profiler: what it is asked for is a call."""

    def __getattribute__(self, name: str) -> Any:
        """The attribute."""
        return super().__getattribute__(name)


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
    """Called as `step(program, inputs)` in place of the program: a train step, for example. What it returns in a dict
    has the names of its keys in a verdict."""
    reference: nn.Module | None = None
    """The same program with the same full weights on one device, called with the same inputs. Both are compared with
    the reference in float64: the error of the program may be at most 2.5 times that of the reference in its own dtype.
    What `step` returns is compared: a loss, gradients; and where it trains, the gradients that the optimizer is given,
    its state and the weights after it. `step` makes the optimizer, or keeps it on the program that it is given. Weights
    and optimizers are as before after each of the runs that are compared."""
    num_graphs: int | None = 1
    """Graphs that the first call compiles; None for any number."""
    is_compiled: bool = False
    """The program calls torch.compile itself, on all of it or on parts."""
    mesh: DeviceMesh | None = None
    """The mesh of the ranks; by default `ctx.mesh`."""
    axis: str = "tp"
    """The ranks of one group of this axis must agree; groups are compared apart."""
    allow: Sequence[tuple[str, str, str]] = ()
    """Intended differences between ranks, (layer, text, reason)."""
    tp_aware: Sequence[str] = ()
    """Names of custom ops, kernels, passes and backends that are right on a shard."""


class TargetError(ConfigError):
    """The module or function that `--target` names does not exist, or the target that it returns is invalid."""


def build(target: str, settings: Sequence[str], *, rank: int, device: torch.device, mesh: DeviceMesh) -> Target:
    """The target as this process builds it, as that rank of `mesh`; `settings` are `key=value`.

    Raises ConfigError where that cannot be.
    """
    config = load_target(target, settings)
    context = WatchedContext(rank=rank, world_size=mesh.size(), device=device, mesh=mesh, settings=config.settings)
    with raised_by(target):
        return target_of(config, find(config)(context))


def import_target(target: str, settings: Sequence[str]) -> None:
    """Import the module of a target. Raises ConfigError where there is no such function."""
    with raised_by(target):
        find(load_target(target, settings))


@contextmanager
def raised_by(target: str) -> Iterator[None]:
    """What the user's code raises within is no bug of ours: TargetRaised."""
    try:
        yield
    except TpCompileError:
        raise
    except Exception as error:
        raise TargetRaised(target, error) from error


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
    found: Any = getattr(module, function, None)
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


def call_target(target: Target, program: Any, inputs: Inputs) -> Any:
    """Call the compiled program as the target says: its step, or the program with its inputs."""
    if target.step is not None:
        return target.step(program, inputs)
    if isinstance(inputs, Tensor):
        return program(inputs)
    if isinstance(inputs, Mapping):
        return program(**inputs)
    return program(*inputs)


_SHARED: tuple[type, ...] = (dist.ProcessGroup, DeviceMesh, torch.Stream, torch.cuda.Stream, torch.cuda.Event)
"""What a program holds of its process: a copy of the program uses the same."""


def copied(value: _Copied, what: str) -> _Copied:
    """A deep copy of a program or its inputs, which shares process groups, meshes and streams with it.

    Modules in the style of Megatron keep their process group, which cannot be copied. Raises ConfigError, with `what`
    the value is, where something else cannot be copied.
    """
    same = dict.fromkeys(_SHARED, lambda one: "the same")  # a string from a reducer: the object is its own copy
    try:
        with mock.patch.dict(copyreg.dispatch_table, same):
            return copy.deepcopy(value)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{what} cannot be copied, and several copies are needed: {error}") from error
