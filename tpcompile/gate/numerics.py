"""Outputs and gradients of one rank -> errors against float64, as multiples of the single-device error.

A fixed tolerance hides bugs in float32 and cries wolf in bfloat16; the same module on one device in the same dtype
says how much error is normal here.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.config import BlockConfig
from tpcompile.dist.strategies import Collectives, TpComm
from tpcompile.gate.localise import first_wrong, module_outputs
from tpcompile.nn.block import BlockInputs, TransformerStack
from tpcompile.nn.state import load_full_state_dict, local_slice_of
from tpcompile.testing.draw import cast_inputs, draw_inputs, draw_stack_weights

Errors = dict[str, dict[str, float]]
"""Name of a tensor -> `error`, `single` (the single-device error) and their `ratio`."""


@dataclass
class Result:
    """Output, and with a backward pass the gradients of the input and of every parameter."""

    output: Tensor
    grads: dict[str, Tensor]


def build(config: BlockConfig, comm: TpComm, full: dict[str, Tensor], device: torch.device) -> TransformerStack:
    """A stack on `device` that holds this rank's slices of `full`."""
    with torch.device("meta"):
        stack = TransformerStack(config, comm)
    stack = stack.to_empty(device=device)
    load_full_state_dict(stack, full)
    return stack


class Reference:
    """The single-device twin, in float64 and in the dtype under test, on the same numbers."""

    def __init__(self, config: BlockConfig, *, seed: int, device: torch.device, train: bool) -> None:
        self.config, self.seed, self.device, self.train = config, seed, device, train
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.full = draw_stack_weights(config, seed=seed, dtype=self.dtype, device=device)
        self.exact = self._run(torch.float64)
        self.single = self._run(self.dtype)

    def inputs(self, seq_len: int | None = None, dtype: torch.dtype | None = None) -> BlockInputs:
        """x, cos, sin, equal on all ranks; in float64 the same numbers as in the dtype under test."""
        tokens = seq_len or self.config.seq_len
        inputs = draw_inputs(self.config, seed=self.seed + 1, device=self.device, dtype=self.dtype, seq_len=tokens)
        if dtype in (None, self.dtype):
            return inputs
        return cast_inputs(inputs, dtype)

    def cotangent(self, dtype: torch.dtype) -> Tensor:
        """Gradient of the output that the backward pass starts from, [B, S, D]."""
        generator = torch.Generator(self.device).manual_seed(self.seed + 2)
        shape = (self.config.batch, self.config.seq_len, self.config.dim)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype).to(dtype)

    def first_wrong(self, stack: nn.Module, *, rank: int, limit: float) -> str:
        """The first module of a wrong stack that is wrong, run in eager; all ranks must call it. Empty for none."""
        got = module_outputs(stack, self.inputs())
        single, exact = (module_outputs(self._twin(d), self.inputs(dtype=d)) for d in (self.dtype, torch.float64))
        return first_wrong(got, single, exact, rank=rank, limit=limit)

    def _twin(self, dtype: torch.dtype) -> TransformerStack:
        config = self.config.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
        return build(config, Collectives(None), {k: v.to(dtype) for k, v in self.full.items()}, self.device)

    def _run(self, dtype: torch.dtype) -> Result:
        stack = self._twin(dtype)
        return run_once(stack, stack, self.inputs(dtype=dtype), self.cotangent(dtype) if self.train else None)


def run_once(program: Any, stack: nn.Module, inputs: BlockInputs, cotangent: Tensor | None) -> Result:
    """Call `program` (the stack, or its compiled form) once, with a backward pass when there is a cotangent."""
    x, *rest = inputs
    if cotangent is None:
        with torch.no_grad():
            return Result(program(x, *rest), {})
    x = x.detach().clone().requires_grad_()
    stack.zero_grad(set_to_none=True)
    output = program(x, *rest)
    output.backward(cotangent[:, : x.shape[1]])
    grads = {name: p.grad for name, p in stack.named_parameters() if p.grad is not None}
    assert x.grad is not None, "the input got no gradient"
    result = Result(output.detach(), {"input": x.grad, **grads})
    stack.zero_grad(set_to_none=True)
    return result


def errors(reference: Reference, stack: nn.Module, got: Result, *, only_forward: bool = False) -> Errors:
    """`forward` and `grad NAME` -> error, single-device error and their ratio, on this rank's slices."""
    found = {"forward": _error(got.output, reference.single.output, reference.exact.output)}
    for name in () if only_forward else reference.exact.grads:
        exact = _slice(name, reference.exact.grads[name], stack)
        single = _slice(name, reference.single.grads[name], stack)
        if name not in got.grads:
            found[f"grad {name}"] = {"error": 1.0, "single": 0.0, "ratio": float("inf")}
            continue
        found[f"grad {name}"] = _error(got.grads[name], single, exact)
    return found


def difference(reference: Reference, stack: nn.Module, one: Result, two: Result) -> Errors:
    """How far two runs of the same maths are apart, in units of the single-device error."""
    pairs = {"forward": (one.output, two.output, reference.single.output, reference.exact.output)}
    for name in sorted(set(one.grads) & set(two.grads)):
        single = _slice(name, reference.single.grads[name], stack)
        exact = _slice(name, reference.exact.grads[name], stack)
        pairs[f"grad {name}"] = (one.grads[name], two.grads[name], single, exact)
    found = {}
    for name, (a, b, single, exact) in pairs.items():
        normal = _error(single, single, exact)
        apart = _relative(a.double() - b.double(), exact)
        found[name] = normal | {"error": apart, "ratio": apart / max(normal["single"], _floor(a.dtype))}
    return found


def _slice(name: str, full: Tensor, stack: nn.Module) -> Tensor:
    return full if name == "input" else local_slice_of(name, full, module=stack)


def _error(got: Tensor, single: Tensor, exact: Tensor) -> dict[str, float]:
    error = _relative(got.double() - exact, exact)
    normal = _relative(single.double() - exact, exact)
    return {"error": error, "single": normal, "ratio": error / max(normal, _floor(got.dtype))}


def _relative(delta: Tensor, exact: Tensor) -> float:
    return float(delta.norm() / exact.norm().clamp_min(torch.finfo(torch.float64).tiny))


def _floor(dtype: torch.dtype) -> float:
    """A quarter ulp: a tensor that one device gets exactly right must not make every other error infinite."""
    return torch.finfo(dtype).eps / 4


def free(device: torch.device) -> None:
    """Give memory of dropped models back, so that the next mode starts with the same room."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
