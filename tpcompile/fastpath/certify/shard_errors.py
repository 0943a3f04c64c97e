"""Fast path and case -> its error on shards, as a multiple of the plain code's on one device in the same dtype.

One device holds the shards of all ranks, so any number of ranks needs one device. Autograd records one graph from the
whole leaves to the joined outputs, sums over ranks included: its gradients are the gradients of the whole, to which
every rank contributes.
"""

from __future__ import annotations

import inspect
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import DivergenceError, FastPathError
from tpcompile.evidence.iterables import grouped
from tpcompile.fastpath.certify.fences import fenced, fenced_allocations
from tpcompile.fastpath.certify.trials import Case, Trial
from tpcompile.fastpath.registry import FastPath, dtype_name
from tpcompile.layout import ShardSpec
from tpcompile.numerics.error_ratio import error_of, relative


@dataclass(frozen=True)
class Setting:
    """How a case is run."""

    tp: int
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"tp {self.tp}, {dtype_name(self.dtype)}"


@dataclass(frozen=True)
class Prepared:
    """One case in one setting, with what the plain code gives on one device."""

    case: Case
    setting: Setting
    is_trained: bool
    exact: dict[str, Tensor]
    """The results in float64."""
    plain: dict[str, Tensor]
    """The results in the dtype of the setting."""
    usual: Mapping[str, float]
    """Output or gradient -> error of the plain code in this dtype, the median over cases."""

    def __str__(self) -> str:
        return f"{self.case.name}, {self.setting}"


def prepared(path: FastPath, cases: Iterable[tuple[Case, Setting]]) -> list[Prepared]:
    """Run the plain code before any mutation is in place, because the kernel may share code with it."""
    known = []
    for case, setting in cases:
        is_trained = path.autograd and not case.forward_only
        exact = _results(_whole(path.replaces), case, torch.float64, setting, is_trained)
        plain = _results(_whole(path.replaces), case, setting.dtype, setting, is_trained)
        known.append(Prepared(case, setting, is_trained, exact, plain, usual={}))
    usual = {dtype: _usual_errors(group) for dtype, group in grouped(known, lambda one: one.setting.dtype).items()}
    return [replace(one, usual=usual[one.setting.dtype]) for one in known]


def _usual_errors(known: Iterable[Prepared]) -> dict[str, float]:
    """Output or gradient -> median error of the plain code; 0 where it has no elements in any case."""
    errors: dict[str, list[float]] = defaultdict(list)
    for one in known:
        for name, exact in one.exact.items():
            errors[name] += [relative(one.plain[name], exact)] if exact.numel() else []
    return {name: statistics.median(found or [0.0]) for name, found in errors.items()}


def ratios(path: FastPath, trial: Trial, known: Prepared) -> dict[str, float]:
    """Output or gradient -> its error on shards over the plain code's on one device.

    The plain code can get a small case right by chance, so its error counts as at least the usual one.
    """
    shards = _on_shards(path, trial, known.case, known.setting)
    found = _results(shards, known.case, known.setting.dtype, known.setting, known.is_trained)
    return {
        name: error_of(found[name], known.plain[name], exact, whole=known.usual[name])["ratio"]
        for name, exact in known.exact.items()
    }


def check_refusals(path: FastPath, trial: Trial, device: torch.device) -> None:
    """Raise DivergenceError when the launcher accepts arguments that it must refuse."""
    for refusal in trial.refusals(device):
        try:
            path.launcher(**refusal.arguments)
        except FastPathError:
            continue
        raise DivergenceError(f"fast path {path.name} takes {refusal.name}; it must raise FastPathError")


Program = Callable[[dict[str, Any]], tuple[Tensor, ...]]
"""Whole arguments -> whole outputs."""


def _whole(function: Callable[..., Any]) -> Program:
    return lambda arguments: _tuple(function(**arguments))


def _on_shards(path: FastPath, trial: Trial, case: Case, setting: Setting) -> Program:
    takes_all_reduce = "all_reduce" in inspect.signature(path.launcher).parameters

    def call(arguments: Mapping[str, Any], all_reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        extra = {"all_reduce": all_reduce} if takes_all_reduce else {}
        return _tuple(path.launcher(**arguments, **extra))

    def run(whole: dict[str, Any]) -> tuple[Tensor, ...]:
        ranks = [_shard(whole, case, rank=rank, size=setting.tp) for rank in range(setting.tp)]
        with fenced_allocations():
            outputs = trial.on_ranks(call, ranks)
        return tuple(_joined(spec, shards) for spec, *shards in zip(case.outputs, *outputs, strict=True))

    return run


def _shard(whole: dict[str, Any], case: Case, *, rank: int, size: int) -> dict[str, Any]:
    own = {**whole, **case.rank_arguments}
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            spec = case.shards.get(name, ShardSpec())
            place = case.memory.get(name, fenced)
            own[name] = place(spec.take(value, rank=rank, size=size))
    return own


def _joined(spec: ShardSpec, shards: list[Tensor]) -> Tensor:
    """The whole; DivergenceError unless each rank holds its slice of it: replicas are equal, and padding is zero."""
    whole = spec.join(shards)
    for rank, shard in enumerate(shards):
        own = spec.take(whole, rank=rank, size=len(shards))
        if not torch.allclose(shard, own, rtol=0, atol=0, equal_nan=True):
            raise DivergenceError(f"rank {rank} holds a different result from the ranks that hold the same part")
    return whole


def _results(program: Program, case: Case, dtype: torch.dtype, setting: Setting, is_trained: bool) -> dict[str, Tensor]:
    """Outputs, and the gradients of a fixed weighted sum of them."""
    wide_dtype = torch.promote_types(dtype, torch.float32)
    leaves = {}
    for name, value in case.arguments.items():
        kept = wide_dtype if name in case.wide else dtype
        needs_grad = is_trained and name not in case.constant
        leaves[name] = _leaf(value, kept, setting.device, needs_grad=needs_grad)
    with torch.set_grad_enabled(is_trained):
        outputs = program(leaves)
    found = {f"output {index}": output.detach() for index, output in enumerate(outputs)}
    if is_trained:
        found |= _gradients(outputs, leaves)
    return found


def _gradients(outputs: Sequence[Tensor], leaves: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradients of a sum of the outputs with weights that differ for every element, equal for equal shapes."""
    weighted = []
    for output in outputs:
        generator = torch.Generator().manual_seed(output.numel())
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
        weighted.append((output.double() * weights).sum())
    sum(weighted[1:], weighted[0]).backward()
    found = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            found[f"grad {name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found


def _leaf(value: Any, dtype: torch.dtype, device: torch.device, *, needs_grad: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.detach().to(device, dtype).requires_grad_(needs_grad)


def _tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
