"""Module and inputs -> Report of the SPMD type check, on fake ranks of one process or on a real rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.torch_api.dispatch import FakeStore, tree_flatten, tree_unflatten
from tpcompile.typecheck import wording
from tpcompile.typecheck.mode import SpmdTypeMode
from tpcompile.typecheck.parameters import Shapes
from tpcompile.typecheck.report import Report, Violation, of_all_ranks
from tpcompile.typecheck.spmd import parse_type
from tpcompile.typecheck.step import is_float, tensors_in

Types = str | Sequence[str]


@contextmanager
def fake_ranks(tp: int, *, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A group of `tp` ranks of which only this one, `rank`, exists; destroyed at the end of the context.

    Collectives return at once and their values mean nothing; types do not depend on values. Raises ConfigError when
    this process already has a process group: use `check_module` with that group.
    """
    if not 0 <= rank < tp or tp < 2:
        raise ConfigError(f"rank={rank} of tp={tp}: nothing to check; pass tp >= 2 and a rank below it")
    with fake_group(tp, rank) as group:
        yield group


@contextmanager
def fake_group(size: int, rank: int) -> Iterator[dist.ProcessGroup]:
    """The same of any size, one rank alone too."""
    if dist.is_initialized():
        raise ConfigError(
            f"this process is rank {dist.get_rank()} of a group of {dist.get_world_size()} already; fake ranks need a "
            "process without one: use check_module(module, inputs, group=...) here"
        )
    hook = sys.excepthook  # init_process_group installs one that prefixes every later traceback with the rank
    backend = ",".join(f"{device}:fake" for device in ("cpu", "cuda", "meta"))
    dist.init_process_group(backend=backend, rank=rank, world_size=size, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        # A group with a backend per device has no default one, and warns on stderr when it is destroyed.
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def check_types(
    build: Callable[[Collectives], nn.Module],
    inputs: Sequence[Any],
    *,
    tp: int = 4,
    ranks: Sequence[int] = (0, -1),
    input_types: Sequence[str | None] | None = None,
    output_type: Types | None = "I",
    parameter_types: Mapping[str, str] | None = None,
    train: bool = True,
) -> Report:
    """Build the module on fake ranks, run it once per rank and follow the types; one process, no GPU.

    `build` gets the collectives of the rank and returns its module, on CPU or meta like `inputs`; weights need no
    values. `ranks` are followed in order, -1 is the last one. All other arguments are those of `check_module`. Raises
    ConfigError as `fake_ranks` and `check_module`.
    """

    def checked(group: dist.ProcessGroup) -> Report:
        return check_module(
            build(Collectives(group)),
            inputs,
            group=group,
            input_types=input_types,
            output_type=output_type,
            parameter_types=parameter_types,
            train=train,
        )

    return on_fake_ranks(tp, ranks, checked)


def on_fake_ranks(tp: int, ranks: Sequence[int], check: Callable[[dist.ProcessGroup], Report]) -> Report:
    """One report of the ranks that `check` followed, each in a group of its own."""
    reports = []
    for rank in sorted({rank % tp for rank in ranks}):
        with fake_ranks(tp, rank=rank) as group:
            reports.append(check(group))
    return of_all_ranks(reports)


def check_module(
    module: nn.Module,
    inputs: Sequence[Any] | Mapping[str, Any],
    *,
    group: dist.ProcessGroup,
    input_types: Sequence[str | None] | None = None,
    output_type: Types | None = "I",
    parameter_types: Mapping[str, str] | None = None,
    full_shapes: Shapes | None = None,
    train: bool = True,
) -> Report:
    """Run `module(*inputs)` once as this rank of `group` and follow the types; the group may be fake or real.

    A mapping of inputs has them by the names of arguments.
    `input_types` has one entry per tensor among the inputs; an entry of None, or no list, means I for a tensor that
    requires grad and C (no gradient) for one that does not. `output_type` is the type that the caller expects of the
    outputs, one for all or one per tensor; None only forbids a partial output. `parameter_types` as in `SpmdTypeMode`,
    and `full_shapes` as well: the shapes of parameters on one device, by name.
    With `train=False` gradients are not judged; otherwise every parameter that requires grad must get the right one.
    Raises ConfigError for types that do not fit.
    """
    mode = SpmdTypeMode(group, module=module, parameter_types=parameter_types, full_shapes=full_shapes, train=train)
    inputs = _declared_inputs(mode, inputs, input_types)
    rank = group.rank()
    with torch.set_grad_enabled(train), mode:
        output = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
        leaves = tensors_in(tree_flatten(output)[0])
        backward = mode.finish(leaves)
    texts = _one_for_each(leaves, output_type, name="output_type", what="output")
    judged = [_wrong_output(mode, leaf, text) for leaf, text in zip(leaves, texts, strict=True)]
    found = [*mode.violations, *(violation for violation in judged if violation is not None)]
    violations = tuple(replace(violation, ranks=(rank,)) for violation in found)
    return Report(group.size(), (rank,), mode.num_ops, violations, mode.num_judged, mode.not_followed_since, backward)


def _declared_inputs(mode: SpmdTypeMode, inputs: Any, types: Sequence[str | None] | None) -> Any:
    """Detached copies of the inputs with their types declared; the caller's tensors stay as they are."""
    leaves, spec = tree_flatten(inputs)
    texts = iter(_one_for_each(tensors_in(leaves), types, name="input_types", what="input"))
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        default = "I" if leaf.requires_grad else "C"
        type_ = parse_type(next(texts) or default, ndim=leaf.dim(), grad=is_float(leaf))
        leaves[place] = fresh = leaf.detach()
        fresh.requires_grad_(type_.grad and mode.train)
        mode.declare(fresh, type_)
    return tree_unflatten(leaves, spec)


def _one_for_each(
    tensors: Sequence[Tensor], types: str | Sequence[str | None] | None, *, name: str, what: str
) -> Sequence[str | None]:
    """The declared type of every tensor, None where it has none; raises ConfigError for a list of the wrong length."""
    if types is None or isinstance(types, str):
        return [types] * len(tensors)
    if len(types) != len(tensors):
        raise ConfigError(f"{name} has {len(types)} entries for {len(tensors)} {what} tensors; give one for each")
    return types


def _wrong_output(mode: SpmdTypeMode, leaf: Tensor, text: str | None) -> Violation | None:
    """Compare the type of an output with the one that the caller expects; constants and unknown types always fit."""
    found = mode.type_of(leaf)
    if found.pending is not None:
        return found.pending.misused("the module returns it")
    wanted = parse_type(text or "V", ndim=leaf.dim(), grad=found.grad)
    worded = None
    if found.kind == "P" and wanted.kind != "P":
        worded = wording.RETURNED_PARTIAL if found.op == "sum" else wording.RETURNED_STATISTIC
    if wanted.kind == "I":
        differs_per_rank = found.kind == "V" and (found.grad or found.dim is not None)
        if differs_per_rank:
            worded = wording.RETURNED_SHARD
        if found.kind == "R" and found.grad:
            worded = wording.RETURNED_R
    if worded is None:
        return None
    made_by = found.origin.what
    op = f"output of {made_by}" if made_by else "output"
    why = worded.why.format(x=found)
    return Violation(worded.rule, op, (str(found),), found.origin.site, why, worded.fix)
