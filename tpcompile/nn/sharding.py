"""Declaration of a parameter's layout over the TP group -> its full shape, one rank's slice, and the whole again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import Collective
from tpcompile.layout import Layout, ShardSpec
from tpcompile.layout import Part as Part  # programs import the layout's names from here, too

DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip
"""dtype -> its name in the text of a compiled graph."""


@dataclass(frozen=True)
class Declaration:
    """Layout of one parameter, and the module whose `shard_specs()` has it."""

    spec: ShardSpec
    declared_by: nn.Module


@dataclass(frozen=True)
class Placement:
    """Layout of one parameter over the ranks of `comm`."""

    spec: ShardSpec
    comm: TpComm | None
    """None where neither the module nor the caller gives ranks: the parameter is whole."""

    @property
    def owners(self) -> TpComm | None:
        """The ranks that hold different rows; None where the parameter is whole on every rank."""
        if self.spec.dim is None or self.comm is None:
            return None
        return self.comm if self.comm.size > 1 else None


@dataclass(frozen=True)
class Declared:
    """Collectives a module issues in mode C, in issue order; a backward list holds for training only.

    Autograd runs nodes in reverse order of their creation, so the backward of a sequence is the reversed sequence.
    """

    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()

    def then(self, after: Declared) -> Declared:
        """This module followed by `after`: the backward pass visits `after` first."""
        return Declared(self.forward + after.forward, after.backward + self.backward)

    def select(self, *, train: bool) -> tuple[Collective, ...]:
        """Forward, and with `train` the backward after it."""
        return self.forward + (self.backward if train else ())


def declared_sum(phase: str, shape: Sequence[int], dtype: torch.dtype, *, group: str = "tp") -> Collective:
    """One sum all-reduce over the TP group, as a digest of the compiled graph spells it."""
    return _declared(phase, "all_reduce", shape, dtype, reduce_op="sum", group=group)


def entered(shape: Sequence[int], dtype: torch.dtype, *, group: str = "tp") -> Declared:
    """`copy_to_tp` of a tensor of that shape."""
    return Declared(backward=(declared_sum("backward", shape, dtype, group=group),))


def reduced(shape: Sequence[int], dtype: torch.dtype, *, dst: Literal["I", "R"] = "I") -> Declared:
    """`all_reduce` of a tensor of that shape."""
    backward = (declared_sum("backward", shape, dtype),) if dst == "R" else ()
    return Declared((declared_sum("forward", shape, dtype),), backward)


def gathered(shape: Sequence[int], dtype: torch.dtype, *, tp: int, dst: Literal["I", "R"] = "R") -> Declared:
    """`all_gather` on dim 0 to the full `shape`."""
    local = (shape[0] // tp, *shape[1:])
    forward = _declared("forward", "all_gather_into_tensor", local, dtype)
    backward = _declared("backward", "reduce_scatter_tensor", shape, dtype, reduce_op="sum")
    return Declared((forward,), (backward,) if dst == "R" else ())


def scattered(shape: Sequence[int], dtype: torch.dtype, *, tp: int, summed: bool) -> Declared:
    """`reduce_scatter` on dim 0 of the full `shape` when `summed`, else `scatter` of a replicated tensor."""
    local = (shape[0] // tp, *shape[1:])
    forward = _declared("forward", "reduce_scatter_tensor", shape, dtype, reduce_op="sum")
    return Declared((forward,) if summed else (), (_declared("backward", "all_gather_into_tensor", local, dtype),))


def _declared(
    phase: str, op: str, shape: Sequence[int], dtype: torch.dtype, *, reduce_op: str = "", group: str = "tp"
) -> Collective:
    name = DTYPE_NAMES[dtype]
    return Collective(phase=phase, op=op, reduce_op=reduce_op, dtype=name, shape=str(list(shape)), group=group)


def specs_of(module: nn.Module, *, layouts: Mapping[str, Layout] | None = None) -> dict[str, ShardSpec]:
    """Layout of every parameter of `module`, keyed like its state dict; arguments and errors of `placements_of`."""
    placements = placements_of(module, layouts=layouts)
    return {name: placement.spec for name, placement in placements.items()}


def placements_of(
    module: nn.Module, *, layouts: Mapping[str, Layout] | None = None, comm: TpComm | None = None
) -> dict[str, Placement]:
    """Layout and ranks of every parameter of `module`, keyed like its state dict.

    Layouts are those of `declarations_of`. `layouts` adds them for modules that declare none: name or pattern ->
    layout, the first that fits; parameters that none fits are then replicated. A shard is one over the ranks of `comm`
    of the module that declares it, or holds it, else of this `comm`.

    Raises ConfigError when a parameter is not declared, a declaration or pattern has no parameter, and for a shard of
    which neither the module nor the caller says over which ranks it is.
    """
    parameters = dict(module.named_parameters())
    declared = declarations_of(module)
    missing = sorted(parameters.keys() - declared.keys())
    if missing and layouts is None:
        raise ConfigError(
            f"no layout is declared for {missing}; declare each parameter in shard_specs() of its module, or pass "
            "layouts={'*.up.weight': ShardSpec(dim=0, parts=(256,))}"
        )
    tied = sorted(declared.keys() - parameters.keys())
    if tied:
        raise ConfigError(f"{tied} are tied to parameters of other names; declare a tied parameter by its first name")
    by_pattern = _layouts_by_name(parameters, layouts or {})
    found = {}
    for name, parameter in parameters.items():
        holder = module.get_submodule(name.rpartition(".")[0])
        declaration = declared.get(name, Declaration(ShardSpec(), holder))
        bound = [getattr(module, "comm", None) for module in (declaration.declared_by, holder)]
        ranks = bound[0] or bound[1] or comm
        spec: Layout = by_pattern.get(name, declaration.spec)
        if not isinstance(spec, ShardSpec):  # a dim: equal shards of it on all ranks
            dim = spec % parameter.dim()
            num_shards = 1 if ranks is None else ranks.size
            spec = ShardSpec(dim=dim, parts=(parameter.shape[dim] * num_shards,))
        found[name] = Placement(spec, ranks)
        _check_has_ranks(name, parameter, found[name])
    return found


def declarations_of(module: nn.Module) -> dict[str, Declaration]:
    """Every layout that a module or one of its children declares in `shard_specs()`, keyed like the state dict.

    A module may declare parameters of its children, by dotted names: `{"norm.weight": ShardSpec()}`. Raises ConfigError
    for a name that is no parameter, and where two modules declare one parameter differently.
    """
    found: dict[str, Declaration] = {}
    for owner, child in module.named_modules():
        if not callable(getattr(type(child), "shard_specs", None)):
            continue  # of the type: a compiled module's wrapper has it by delegation
        for name, spec in child.shard_specs().items():
            full_name = f"{owner}.{name}" if owner else name
            known = found.setdefault(full_name, Declaration(spec, child))
            if known.spec != spec:
                raise ConfigError(
                    f"{full_name} is declared twice, {known.spec} and {spec}; declare each parameter once"
                )
    unknown = sorted(found.keys() - dict(module.named_parameters(remove_duplicate=False)).keys())
    if unknown:
        raise ConfigError(f"shard_specs() declares {unknown}, which are no parameters; correct the names")
    return found


def _layouts_by_name(parameters: Iterable[str], layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The first layout whose pattern fits, for every parameter that has one."""
    names = list(parameters)
    found: dict[str, Layout] = {}
    for pattern, layout in layouts.items():
        fitting = [name for name in names if fnmatchcase(name, pattern)]
        if not fitting:
            raise ConfigError(f"layouts: {pattern!r} fits no parameter; there are {', '.join(names) or 'none'}")
        found = dict.fromkeys(fitting, layout) | found
    return found


def _check_has_ranks(name: str, parameter: Tensor, placement: Placement) -> None:
    if placement.comm is not None:
        return
    full_shape = placement.spec.full_shape(parameter.shape)
    if full_shape != tuple(parameter.shape):
        raise ConfigError(
            f"{name} is a shard, {tuple(parameter.shape)} of {full_shape}, over ranks that are not known; keep the "
            "Collectives that the module was built with in self.comm, or pass comm="
        )
