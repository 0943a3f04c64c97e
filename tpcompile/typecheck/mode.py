"""Eager ops and wrapper calls of one rank -> the SPMD types of its tensors, and the violations.

A `TorchDispatchMode` sees every op below autograd with the program's own tensor objects, so types are kept per tensor
in a weak dictionary. The grad mode is the program's: nothing in a `torch.no_grad()` block has a gradient. Nothing stays
registered when the mode ends, and it is never active in compiled code, while that is traced or run.
Seen on torch 2.11.0 and 2.13.0: `torch.utils._python_dispatch`, `torch.utils.weak`.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.weak import WeakTensorKeyDictionary

from tpcompile.collectives.observer import Call, observing
from tpcompile.ranks.groups import rank_index
from tpcompile.torch_api.dispatch import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    around_functions,
    base_of,
    has_gradient_hook,
)
from tpcompile.typecheck.cut import Sources, nodes_behind
from tpcompile.typecheck.functions import Applied, is_hand_written, types_of_results
from tpcompile.typecheck.ops import WAITS
from tpcompile.typecheck.parameters import Shapes, types_of_parameters
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.rules import judge
from tpcompile.typecheck.site import Site, current_site, in_function_of_torch, in_generated_function, user_function
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, SpmdType, of_base, varying
from tpcompile.typecheck.step import Step, is_float, is_same_group, tensors_in
from tpcompile.typecheck.wording import RESULT_DROPPED


@dataclass
class _Communicated:
    """The result of a collective, which some later op or the caller has to read."""

    dropped: Violation
    """What is reported where nothing reads it."""
    place: int
    """Number of violations before it."""
    alive: Callable[[], Any]
    """Weak reference to the result."""
    is_read: bool = False


class SpmdTypeMode(TorchDispatchMode):
    """Follows the types of tensors while it is active; after it has ended, `violations` are in program order.

    `group` is the one whose collectives it follows. `module` gives names for the report and the types of parameters:
    from the `shard_specs()` of its children, or for modules that have none from `parameter_types`, type by name
    pattern such as `{"*.wo.weight": "V(1)"}`, or from `full_shapes`, those on one device; all other parameters are
    replicated, all other tensors constants unless `declare`d. Raises ConfigError for a pattern that matches no
    parameter and for a type that does not fit its parameter. With `train=False` gradients are not followed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        module: nn.Module | None = None,
        parameter_types: Mapping[str, str] | None = None,
        full_shapes: Shapes | None = None,
        train: bool = True,
    ) -> None:
        super().__init__()
        self.group, self.train = group, train
        self.num_ops = self.num_judged = 0
        self.not_followed_since = ""
        self.violations: list[Violation] = []
        self._entered: list[tuple[Site, Any]] = []
        """Each wrapper call whose result has a gradient, and its place in the autograd graph."""
        self._types: Any = WeakTensorKeyDictionary()
        self._results: Any = WeakTensorKeyDictionary()
        self._communicated: list[_Communicated] = []
        self._depth = 0
        self._module_names: dict[int, str] = {}
        """id of a module -> its name for the report."""
        followed: dict[str, Tensor] = {}
        if module is not None:
            if train:
                followed = dict(module.named_parameters())
            for name, child in module.named_modules():
                kind = type(child).__name__
                self._module_names[id(child)] = f"{name} ({kind})" if name else kind
            for parameter, type_ in types_of_parameters(
                module, parameter_types or {}, tp=group.size(), full=full_shapes or {}
            ):
                self.declare(parameter, type_)
        self._sources = Sources(followed)

    def __enter__(self) -> SpmdTypeMode:
        self._stack = ExitStack()
        self._stack.enter_context(observing(self))
        self._stack.enter_context(around_functions(self._applied))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()
        # A result that was freed unread was dropped; one that is alive may still be read by the caller.
        unread = [result for result in self._communicated if not result.is_read]
        if any(result.alive() is not None for result in unread):
            gc.collect()  # a result that only a reference cycle holds is dropped as well
        dropped = [result for result in unread if result.alive() is None]
        for result in reversed(dropped):
            self.violations.insert(result.place, result.dropped)

    def declare(self, tensor: Tensor, type_: SpmdType) -> None:
        """Set the type of a tensor."""
        self._types[tensor] = _with_own_scale(type_ if self.train else replace(type_, grad=False))

    def type_of(self, tensor: Tensor) -> SpmdType:
        """Type of a tensor; one that the mode has not seen is a constant, a DTensor has its own."""
        if isinstance(tensor, DTensor):
            return self._of_dtensor(tensor)
        tensor = _plain(tensor)
        found = self._types.get(tensor, CONSTANT)
        if found.kind == "C":
            # The rank as a tensor is cached by device, so this is the same object that the program gets.
            is_rank = tensor.dtype == torch.int64 and tensor is rank_index(self.group, tensor.device)
            if is_rank:
                return varying()
            return found
        if found.scale is not None and has_gradient_hook(tensor):
            return replace(found, scale=found.scale.with_gradient(math.nan))
        return found

    def read(self, tensor: Tensor) -> None:
        """Record that this tensor is used, by an op or by the caller of the module."""
        result = self._results.get(_plain(tensor))
        if result is not None:
            result.is_read = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        name = func._schema.name.replace("::", ".")
        if name not in WAITS:
            for tensor in tensors_in((args, kwargs)):
                self.read(tensor)
        out = func(*args, **kwargs)
        written = []
        if func._schema.is_mutable or name.startswith("c10d."):
            name = name.removesuffix("_")
            written = _written(func, args, kwargs)
        step = self._step(name, args, kwargs, out)
        step.written = written
        step.is_pointwise = torch.Tag.pointwise in func.tags
        if name in WAITS:
            self._results[_plain(out)] = self._results.get(_plain(args[0]))
        is_reduce = name == "_c10d_functional.all_reduce" and step.is_own_group(args[2])
        self._follow(step, expects_reader=is_reduce)
        return out

    def observe(self, call: Call, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Follow a wrapper call instead of the ops it is made of."""
        self.read(x)
        self._depth += 1
        try:
            out = _stand_in(call, x) if x.is_meta else run()
            if out is x:
                out = out.view_as(out)  # copy_to_tp may return x itself, which keeps its type
        finally:
            self._depth -= 1
        step = self._step(call.name, (x,), vars(call), out)
        self._follow(step, expects_reader=call.name != "copy_to_tp")
        if isinstance(out, Tensor) and out.grad_fn is not None:
            self._entered.append((step.site_of(), out.grad_fn))
        return out

    def aside(self, run: Callable[[], Any]) -> tuple[Any, list[Violation], bool]:
        """What `run` returns, the violations in it, and whether all of its ops were judged; they are not counted."""
        kept = self.num_ops, self.num_judged, self.not_followed_since, self.violations
        self.num_ops = self.num_judged = 0
        self.violations = []
        try:
            out = run()
            return out, self.violations, self.num_judged == self.num_ops
        finally:
            self.num_ops, self.num_judged, self.not_followed_since, self.violations = kept

    def _applied(self, cls: Any, args: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Follow a hand-written autograd.Function through its forward and its backward."""
        if self._depth or not is_hand_written(cls) or in_function_of_torch():
            return run()
        types = [self.type_of(tensor) for tensor in tensors_in(args)]
        place, site = len(self.violations), current_site(self._module_names)
        out = run()
        for number, found in enumerate(self.violations[place:], place):
            # What is wrong with a call is at the call: the same Function is right elsewhere.
            self.violations[number] = replace(found, site=site)
        applied = Applied(cls.__name__, cls.backward, args, types, tensors_in(out), site, self.group.size())
        if not self.train or not torch.is_grad_enabled():
            return out
        found_types, violation = types_of_results(applied, self)
        self.num_ops += 1
        if violation is not None:
            self.violations.append(violation)
        is_followed = all(type_.kind != "U" for type_ in found_types)
        if is_followed or violation is not None:
            self.num_judged += 1
        elif not self.not_followed_since:
            self.not_followed_since = f"{applied.name} {applied.site.short}"
        for result, type_ in zip(applied.results, found_types, strict=True):
            self._types[_plain(result)] = _with_own_scale(type_)
        return out

    def finish(self, outputs: list[Tensor]) -> frozenset[Site]:
        """Report the ops by which alone a parameter reaches these outputs, without a gradient.

        Returns where the wrapper calls are that a backward pass from the outputs gets to.
        """
        for output in outputs:
            self.read(output)
        for place, violation in reversed(self._sources.violations(outputs)):
            self.violations.insert(place, violation)
        reached = nodes_behind(outputs)
        return frozenset(site for site, node in self._entered if node in reached)

    def _step(self, name: str, args: Any, kwargs: Any, out: Any) -> Step:
        step = Step(
            name,
            tuple(args),
            dict(kwargs),
            out,
            self.type_of,
            partial(current_site, self._module_names),
            self.group,
            self.group.size(),
            self.group.rank(),
            violations=self.violations,
        )
        results = step.results
        is_differentiable = not results or any(is_float(t) for t in results)
        step.differentiable = self.train and _grad_enabled(name) and is_differentiable
        return step

    def _follow(self, step: Step, *, expects_reader: bool) -> None:
        """Judge an op, and keep the types of its results."""
        place = len(self.violations)
        operands = list(map(_plain, step.operands))
        if operands and step.is_collective:
            self._sources.note_collective(step, operands[0], place=place)
        types = self._judged(step)
        self._count(step, types, is_violation=len(self.violations) > place)
        if not step.is_wrapper:
            self._sources.note_op(step, operands, is_recorded=_grad_enabled(step.name), place=place)
        # An all-reduce of a constant is used as a barrier.
        if expects_reader and step.type_at(0).kind != "C":
            dropped = step.violation(RESULT_DROPPED)
            result = _Communicated(dropped, len(self.violations), weakref.ref(step.out))
            self._communicated.append(result)
            self._results[_plain(step.out)] = result
        self._keep(step, types)

    def _judged(self, step: Step) -> list[SpmdType]:
        is_differentiated = not self.train or step.is_wrapper or _grad_enabled(step.name)
        if not is_differentiated and in_function_of_torch():
            # It has a gradient of its own, which only its author knows.
            return step.typed(UNKNOWN)
        is_dtensor = any(isinstance(tensor, DTensor) for tensor in step.results)
        if is_dtensor:
            return list(map(self.type_of, step.results))
        return judge(step)

    def _count(self, step: Step, types: Sequence[SpmdType], *, is_violation: bool) -> None:
        """Count an op, and keep the first that was not judged; one with a violation was."""
        self.num_ops += 1
        if is_violation:
            self.num_judged += 1
            return
        if step.types.has("U"):
            return
        is_followed = not types or types[0].kind != "U"  # later results are statistics, as of an attention
        if step.is_judged and is_followed:
            self.num_judged += 1
        else:
            self._note_not_followed(step)

    def _note_not_followed(self, step: Step) -> None:
        if not self.not_followed_since:
            since = f"{user_function() or step.name} {step.site_of().short}"
            self.not_followed_since = f"{since}: {step.why_not_judged}" if step.why_not_judged else since

    def _keep(self, step: Step, types: Sequence[SpmdType]) -> None:
        targets = step.targets
        bases = [tensor._base for tensor in step.written if tensor._base is not None]
        self._sources.add(step, [*map(_plain, targets), *bases], map(_plain, step.operands))
        for tensor, type_ in zip(targets, types, strict=False):
            # As this tensor can have it: integers have no gradient, a dim must exist.
            grad = type_.grad and step.differentiable and is_float(tensor)
            has_dim = type_.dim is not None and type_.dim < tensor.dim()
            kept = _with_own_scale(replace(type_, grad=grad).keep_dim_if(has_dim))
            self._types[_plain(tensor)] = kept
            base = base_of(tensor) if step.written else None
            if base is None:
                continue
            old = self.type_of(base)
            self._types[base] = of_base(old, kept)
            was_known = "U" not in (old.kind, kept.kind)
            if was_known and self._types[base].kind == "U":
                self._note_not_followed(step)

    def _of_dtensor(self, tensor: DTensor) -> SpmdType:
        """Its placement over the checked group; torch keeps its gradient right."""
        mesh, (placement, *others) = tensor.device_mesh, tensor.placements
        if others or not is_same_group(mesh.get_group(), self.group):
            return UNKNOWN
        if placement.is_partial():
            return SpmdType("P", tensor.requires_grad)
        if placement.is_replicate():
            return SpmdType("I", tensor.requires_grad)
        if type(placement) is Shard:
            return varying(placement.dim, grad=tensor.requires_grad)
        return UNKNOWN


def _plain(tensor: Tensor) -> Tensor:
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _grad_enabled(name: str) -> bool:
    """Grad mode of the program; torch's functional collectives turn it off for their own ops."""
    return torch.is_grad_enabled() or name.startswith("_c10d_functional.") or in_generated_function()


def _with_own_scale(type_: SpmdType) -> SpmdType:
    """The type with a scale, where its kind has one; without a gradient no tensor gets one through it."""
    if type_.kind in ("C", "U"):
        return type_
    scale = type_.multiples
    return replace(type_, scale=scale if type_.grad else scale.with_gradient(0.0))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors the op writes to; c10d ops take their outputs first, which not all of their schemas declare."""
    if func._schema.name.startswith("c10d::"):
        return tensors_in(args[0])
    arguments = func._schema.arguments
    names = [argument.name for argument in arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    written: list[Tensor] = []
    for argument in arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written += tensors_in(given.get(argument.name))
    return written


def _stand_in(call: Call, x: Tensor) -> Tensor:
    """A tensor of the shape of the result, on the meta device, where nothing is communicated."""
    size = call.group.size()
    dim: Any = call.dim  # an int for these wrappers
    shape = list(x.shape)
    if call.name == "all_gather_single":
        shape[dim] *= size
    elif call.name in ("reduce_scatter_single", "scatter_single"):
        shape[dim] //= size
    if not x.requires_grad:
        return x.new_empty(shape)
    return x.sum().expand(shape).contiguous()  # in the autograd graph, so that gradients can be followed
