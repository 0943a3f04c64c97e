"""Eager ops and wrapper calls of one rank -> the contract types of its tensors, and the violations.

A `TorchDispatchMode` sees every op below autograd, and the tensors it sees are the program's own objects, so types are
kept per tensor in a weak dictionary. Grad mode is the program's, so a `torch.no_grad()` block counts. Nothing stays
registered when the mode ends, and compiled code never sees it: it dispatches nothing while it is traced or run.
Seen on torch 2.11.0 and 2.13.0: `torch.utils._python_dispatch`, `torch.utils.weak`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from tpcompile.torch_api.dispatch import AsyncCollectiveTensor, TorchDispatchMode
from tpcompile.typecheck.report import Violation
from tpcompile.typecheck.rules import judge
from tpcompile.typecheck.rules_collective import judge_call
from tpcompile.typecheck.site import Site, current_site, in_user_function
from tpcompile.typecheck.spmd import CONSTANT, UNKNOWN, Origin, SpmdType, parse_type, varying
from tpcompile.typecheck.step import Step, tensors_in
from tpcompile.collectives.api import rank_index
from tpcompile.collectives.observer import Call, observing
from tpcompile.errors import ConfigError

_PASSES = ("_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")


@dataclass
class _Communicated:
    """The result of a collective, to be read by somebody."""

    origin: Origin
    operand: str
    place: int
    """Number of violations before it."""
    alive: Callable[[], Any]
    is_read: bool = False


class ContractMode(TorchDispatchMode):
    """Follows the types of tensors while it is entered; `violations` are in program order after it has ended.

    `module` gives names for the report and the types of parameters: from the `shard_specs()` of its children, or for
    modules that have none from `parameter_types`, type by name pattern such as `{"*.wo.weight": "V(1)"}`; other
    parameters are replicated, other tensors constants unless `declare`d. Raises ConfigError for a pattern that fits
    no parameter and a type that does not fit its own. With `train=False` no gradient is wanted.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        module: nn.Module | None = None,
        parameter_types: Mapping[str, str] | None = None,
        train: bool = True,
    ) -> None:
        super().__init__()
        self.group, self.train = group, train
        self.num_ops = 0
        self.violations: list[Violation] = []
        self._types: Any = WeakTensorKeyDictionary()
        self._results: Any = WeakTensorKeyDictionary()
        self._communicated: list[_Communicated] = []
        self._depth = 0
        self._module_names: dict[int, str] = {}
        if module is not None:
            self._read(module)
            self._read_given(module, parameter_types or {})

    def __enter__(self) -> ContractMode:
        self._stack = ExitStack()
        self._stack.enter_context(observing(self))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()
        self._report_dropped()

    def declare(self, tensor: Tensor, type_: SpmdType) -> None:
        """Set the type of a tensor."""
        self._types[tensor] = type_ if self.train else replace(type_, grad=False)

    def type_of(self, tensor: Tensor) -> SpmdType:
        """Type of a tensor; one that the mode has not seen is a constant."""
        tensor = _plain(tensor)
        found = self._types.get(tensor)
        return self._type_of_unseen(tensor) if found is None else found

    def read(self, tensor: Tensor) -> None:
        """Take note that somebody uses this tensor, such as the caller of the module."""
        result = self._results.get(_plain(tensor))
        if result is not None:
            result.is_read = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._depth:
            return func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        name = f"{namespace}.{name}"
        if name not in _PASSES:
            for tensor in tensors_in((args, kwargs)):
                self.read(tensor)
        out = func(*args, **kwargs)
        self.num_ops += 1
        in_place = func._schema.is_mutable or namespace == "c10d"
        step = self._step(name.removesuffix("_") if in_place else name, args, kwargs, out)
        step.is_pointwise = torch.Tag.pointwise in func.tags
        self._keep(step, self._judged(step), _written(func, args, kwargs) if in_place else [])
        return out

    def observe(self, call: Call, x: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """See a wrapper call, in place of the ops it is made of."""
        self.read(x)
        self._depth += 1
        try:
            out = _stand_in(call, x) if x.is_meta else run()
            # copy_to_tp may return x itself; the new type must not overwrite the old one.
            out = out.view_as(out) if out is x else out
        finally:
            self._depth -= 1
        self.num_ops += 1
        step = self._step(call.name, (x,), {}, out)
        self._keep(step, judge_call(step, call), [])
        if call.name != "copy_to_tp" and isinstance(out, Tensor):
            self._expect_reader(step, out)
        return out

    def _judged(self, step: Step) -> Any:
        # A hand-written autograd.Function has a gradient of its own, which nobody but its author knows.
        if self.train and not _grad_enabled(step.name) and in_user_function():
            return UNKNOWN
        if step.name == "_c10d_functional.all_reduce" and step.is_own_group(step.args[2]):
            types = judge(step)
            self._expect_reader(step, step.out)
            return types
        if step.name in _PASSES:
            self._results[_plain(step.out)] = self._results.get(_plain(step.args[0]))
        return judge(step)

    def _step(self, name: str, args: Any, kwargs: Any, out: Any) -> Step:
        results = tensors_in(out)
        differentiable = self.train and _grad_enabled(name) and (not results or any(_is_float(t) for t in results))
        return Step(
            name, tuple(args), dict(kwargs), out, self.type_of, self._site, self.group.size(),
            differentiable=differentiable, is_own_group=self._is_own, violations=self.violations,
        )  # fmt: skip

    def _keep(self, step: Step, types: Any, written: list[Tensor]) -> None:
        targets = written or tensors_in(step.out)
        types = list(types) if isinstance(types, (list, tuple)) else [types] * len(targets)
        for tensor, type_ in zip(targets, types, strict=False):
            kept = _fitting(type_, tensor, differentiable=step.differentiable)
            self._types[_plain(tensor)] = kept
            if written and tensor._base is not None:
                base = tensor._base
                self._types[base] = _of_base(self.type_of(base), kept, base)

    def _expect_reader(self, step: Step, out: Tensor) -> None:
        if step.type_at(0).kind == "C":
            return  # a reduce of a constant is how some wait for each other
        result = _Communicated(step.origin(), str(step.type_at(0)), len(self.violations), weakref.ref(out))
        self._communicated.append(result)
        self._results[_plain(out)] = result

    def _report_dropped(self) -> None:
        """A result that died unread; one that is alive may still be read by the caller."""
        if any(not r.is_read and r.alive() is not None for r in self._communicated):
            gc.collect()  # what only a reference cycle holds is dropped as well
        dropped = [r for r in self._communicated if not r.is_read and r.alive() is None]
        for result in reversed(dropped):
            violation = Violation(
                "result-dropped", result.origin.what, (result.operand,), result.origin.site,
                why="nobody reads the result of this collective: it is out of place, the input stays as it was",
                fix=f"use what it returns: x = {result.origin.what}(x, ...)",
            )  # fmt: skip
            self.violations.insert(result.place, violation)

    def _read(self, module: nn.Module) -> None:
        """Names of the modules, and the types their parameters are declared to have; undeclared ones are replicated."""
        for name, child in module.named_modules():
            self._module_names[id(child)] = f"{name} ({type(child).__name__})" if name else type(child).__name__
            specs = child.shard_specs() if hasattr(child, "shard_specs") else {}
            for leaf, parameter in child.named_parameters(recurse=False):
                # A tied parameter belongs to the module that declares it.
                if leaf in specs or parameter not in self._types:
                    dim, grad = specs[leaf].dim if leaf in specs else None, parameter.requires_grad
                    shard = SpmdType("I", grad) if dim is None else varying(dim % parameter.dim(), grad=grad)
                    self.declare(parameter, shard)

    def _read_given(self, module: nn.Module, types: Mapping[str, str]) -> None:
        for pattern, text in types.items():
            found = [p for name, p in module.named_parameters(remove_duplicate=False) if fnmatchcase(name, pattern)]
            if not found:
                names = ", ".join(name for name, _ in module.named_parameters())
                raise ConfigError(f"parameter_types: {pattern!r} fits no parameter; there are {names or 'none'}")
            for parameter in found:
                self.declare(parameter, parse_type(text, ndim=parameter.dim(), grad=parameter.requires_grad))

    def _type_of_unseen(self, tensor: Tensor) -> SpmdType:
        # The rank as data is cached by device, so this is the very object the program gets.
        is_rank = tensor.dtype == torch.int64 and tensor is rank_index(self.group, tensor.device)
        return varying() if is_rank else CONSTANT

    def _site(self) -> Site:
        return current_site(self._module_names)

    def _is_own(self, group: Any) -> bool:
        if isinstance(group, str):
            return group == self.group.group_name
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        return group is self.group or getattr(group, "group_name", "") == self.group.group_name


def _plain(tensor: Tensor) -> Tensor:
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _grad_enabled(name: str) -> bool:
    """Grad mode of the program; torch's functional collectives turn it off around themselves."""
    return torch.is_grad_enabled() or name.startswith("_c10d_functional.")


def _is_float(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _fitting(type_: SpmdType, tensor: Tensor, *, differentiable: bool) -> SpmdType:
    """The type as this tensor can have it: integers have no gradient, a dim must exist."""
    if type_.grad and not (differentiable and _is_float(tensor)):
        type_ = replace(type_, grad=False)
    return type_.with_dim(None) if type_.dim is not None and type_.dim >= tensor.dim() else type_


def _of_base(old: SpmdType, part: SpmdType, base: Tensor) -> SpmdType:
    """Type of a tensor after a part of it was written through a view."""
    part = part.with_dim(None) if part.dim is not None else part
    if old.kind == "C" or old == part:
        return part
    if {old.kind, part.kind} == {"V"} or part.kind == "C":
        return replace(old, grad=old.grad or part.grad).with_dim(None) if old.kind == "V" else old
    return UNKNOWN


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors the op writes to; c10d ops take their outputs first and do not all say so in the schema."""
    if func._schema.name.startswith("c10d::"):
        return tensors_in(args[0])
    written: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += tensors_in([value])
    return written


def _stand_in(call: Call, x: Tensor) -> Tensor:
    """The shape of a result on the meta device, where there is nothing to communicate."""
    size, shape = call.group.size(), list(x.shape)
    if call.dim is not None and call.name == "all_gather_single":
        shape[call.dim] *= size
    elif call.dim is not None and call.name in ("reduce_scatter_single", "scatter_single"):
        shape[call.dim] //= size
    return x.new_empty(shape).requires_grad_(x.requires_grad)
