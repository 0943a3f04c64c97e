"""A call that may take optimizer steps -> what each step was given and made, by parameter; then all is as before.

Optimizers are followed by torch's hooks for all of them, so that a program names none of its own: fused, foreach and
plain ones, one or several, made before the call or in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpcompile.torch_api.dispatch import local_part

Of = tuple[str, str]
"""What a tensor is of a parameter, and the parameter's name: `exp_avg`, `up.weight`."""
GRADIENT, WEIGHT = "gradient", "weight"
"""What is kept of a parameter, beside the keys of its optimizer's state."""
_PROGRESS = "step"
"""Key of the number of steps in an optimizer's state."""


def plain_name(name: str) -> str:
    """The name of a parameter or module without what torch.compile puts around it."""
    return name.replace("_orig_mod.", "").removesuffix("_orig_mod")


@dataclass
class Step:
    """What the optimizers of one call were given and made, in that order."""

    names: dict[int, str]
    """`id` of a parameter -> its name."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Name -> the gradient as its optimizer was given it first: clipped, summed over micro-batches."""
    optimizers: list[Optimizer] = field(default_factory=list)
    saved: list[Callable[[], None]] = field(default_factory=list)
    """Each puts something back as it was before the call."""
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """`id` of a parameter or buffer -> it, and a copy of its value."""

    @property
    def held(self) -> frozenset[str]:
        """Names of the parameters that an optimizer which stepped has."""
        groups = (group["params"] for optimizer in self.optimizers for group in optimizer.param_groups)
        return frozenset(self.names[id(parameter)] for group in groups for parameter in group)

    @property
    def has_changed(self) -> bool:
        """True where an optimizer stepped, or the call changed a parameter by itself."""
        pairs = (map(local_part, self.before[key]) for key in self.names if key in self.before)
        return bool(self.optimizers) or not all(torch.equal(now, before) for now, before in pairs)

    def weights_before(self) -> dict[str, Tensor]:
        """The parameters as they were before the call."""
        return {name: self.before[key][1] for key, name in self.names.items() if key in self.before}

    def made(self) -> dict[Of, Tensor]:
        """Gradients, the optimizers' state and the weights now; numbers of steps are left out."""
        found = {(GRADIENT, name): gradient for name, gradient in self.gradients.items()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                name = self.names[id(parameter)]
                tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
                found |= {(key, name): value.detach() for key, value in tensors.items() if key != _PROGRESS}
        now = ((name, self.before[key][0]) for key, name in self.names.items() if key in self.before)
        return found | {(WEIGHT, name): parameter.detach() for name, parameter in now}

    def put_back(self) -> None:
        """Weights, buffers and optimizers as they were before the call."""
        with torch.no_grad():
            for tensor, value in self.before.values():
                tensor.copy_(value)
            for restore in self.saved:
                restore()

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Remember the values of these, by name, unless they are remembered."""
        for name, tensor in tensors.items():
            if id(tensor) not in self.before:
                self.before[id(tensor)] = (tensor, tensor.detach().clone())
            if isinstance(tensor, nn.Parameter):
                self.names.setdefault(id(tensor), name)

    def begin(self, optimizer: Optimizer) -> None:
        """Keep the gradients that the optimizer is given, and at its first step what it must be put back to."""
        for number, group in enumerate(optimizer.param_groups):
            given = {f"parameter {number}.{place}": each for place, each in enumerate(group["params"])}
            self.keep(given)
            for name, each in given.items():
                self.names.setdefault(id(each), name)  # a view of a parameter is a plain tensor
                if each.grad is not None:
                    self.gradients.setdefault(self.names[id(each)], each.grad.detach().clone())
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
            self.saved.append(_saved(optimizer))


@contextmanager
def followed(module: nn.Module | None) -> Iterator[Step]:
    """Follow the optimizers that step within; afterwards weights, buffers and optimizers are as before."""
    step = Step({})
    if module is not None:
        step.keep({plain_name(name): each for name, each in module.named_parameters()})
        step.keep({plain_name(name): each for name, each in module.named_buffers()})
    handle = register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: step.begin(optimizer))
    try:
        yield step
    finally:
        handle.remove()
        step.put_back()


@contextmanager
def buffers_put_back(module: nn.Module | None) -> Iterator[None]:
    """Afterwards buffers, such as running statistics, are as before."""
    buffers = list(module.buffers()) if module is not None else []
    before = [each.detach().clone() for each in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in zip(buffers, before, strict=True):
                each.copy_(value)


def _saved(optimizer: Optimizer) -> Callable[[], None]:
    """Puts the optimizer's state and settings back; a compiled step is guarded on the tensors, so they are kept."""
    kept = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    tensors = [value for state in kept.values() for value in state.values() if isinstance(value, Tensor)]
    values = [tensor.clone() for tensor in tensors]
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]

    def restore() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        optimizer.state.clear()
        optimizer.state.update(kept)
        for group, setting in zip(optimizer.param_groups, settings, strict=True):
            group.update(setting)

    return restore
