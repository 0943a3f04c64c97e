"""A target -> the program as one process builds it, on numbers that are given; what it returns, and its gradients.

For processes that exist for one such program: the default group, torch's seeds and its default dtype stay as set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum, auto
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tpcompile.layout import ShardSpec
from tpcompile.nn.sharding import declarations_of
from tpcompile.target import Target
from tpcompile.torch_api.dispatch import local_part, tree_flatten, tree_unflatten
from tpcompile.typecheck.steady import Steady

_TIMEOUT_S = 20
"""Of a collective."""
_SEED = 1234
_SPREAD = 0.2
"""Standard deviation of a parameter that is constant as it is built, such as a bias of zeros."""
Build = Callable[[dist.ProcessGroup], Target]
"""Group of the rank -> the target."""
Outputs = dict[str, Tensor]


class Mode(Enum):
    """How a program is run."""

    STEADY = auto()
    """In training, with constants in place of random numbers: masks of a rank are not those of one device."""
    EVAL = auto()


class NotComparable(Exception):
    """Why the numbers of the ranks cannot be compared with those of one device."""


@dataclass(frozen=True)
class Place:
    """A process among those that run a program together."""

    rank: int
    size: int
    store: Path
    """File through which they find each other."""
    dtype: torch.dtype | None
    """Of all floating parameters, buffers and inputs; None leaves them as they are."""


@dataclass(frozen=True)
class Known:
    """A parameter as a process builds it."""

    shape: tuple[int, ...]
    """Of its part on the rank."""
    full: tuple[int, ...] | None
    """Of all of it, where the program says so: that of a DTensor."""
    trained: bool
    mean: float
    deviation: float

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return math.prod(self.full or self.shape)


@dataclass(frozen=True)
class Description:
    """A program as a process builds it."""

    parameters: Mapping[str, Known]
    buffers: Mapping[str, Tensor]
    """And other tensors that modules keep."""
    inputs: Sequence[Any]
    """The leaves of its arguments."""
    declared: Mapping[str, ShardSpec]
    """Layouts that modules declare."""
    mode: Mode | None = None
    """The first in which two runs return the same; None where there is none."""
    hidden: frozenset[int] = frozenset()
    """Inputs that have the shape of an output of a program with trained parameters: those of a block among others,
    whose gradient the block before it needs."""


@dataclass
class Run:
    """What a program returned, and the gradients of its parameters and inputs."""

    outputs: Outputs
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    drawn: list[tuple[Tensor, int]] = field(default_factory=list)
    """What random ops returned, with the seed of the generator."""

    @property
    def named(self) -> dict[str, Tensor]:
        """All of them."""
        grads = {f"grad {name}": grad for name, grad in self.grads.items() if grad is not None}
        return self.outputs | grads | {f"drawn {place}": tensor for place, (tensor, _) in enumerate(self.drawn)}


class Program:
    """The module of a target, with its arguments."""

    def __init__(self, build: Build, place: Place, *, seed: int = 0) -> None:
        group = _connected(place)
        if place.dtype is not None:
            torch.set_default_dtype(place.dtype)
        torch.manual_seed(seed)
        with _seeds_moved_by(seed):
            built = build(group)
        if not isinstance(built.program, nn.Module):
            raise NotComparable("the program is no module")
        if built.mesh is not None and built.mesh.ndim > 1:
            raise NotComparable("the mesh has several axes")
        self.module: nn.Module = built.program
        inputs = (built.inputs,) if isinstance(built.inputs, Tensor) else built.inputs
        self.leaves, self._spec = tree_flatten(inputs)
        if place.dtype is not None:
            self.module = self.module.to(place.dtype)
            for number, leaf in enumerate(self.leaves):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    self.leaves[number] = leaf.detach().to(place.dtype).requires_grad_(leaf.requires_grad)
        self._buffers = {name: buffer.detach().clone() for name, buffer in self._state()}
        self._force_eager = built.is_compiled
        self._random_state = torch.get_rng_state()

    def described(self, *, runs: bool = False) -> Description:
        """What it is made of; with `runs`, what running it shows as well."""
        parameters = {name: _known(parameter) for name, parameter in self.module.named_parameters()}
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in self.leaves]
        declared = {name: declaration.spec for name, declaration in declarations_of(self.module).items()}
        found = Description(parameters, self._buffers, leaves, declared)
        if not runs:
            return found
        mode = next((mode for mode in Mode if self._is_repeatable(mode)), None)
        return replace(found, mode=mode, hidden=self._hidden())

    def _hidden(self) -> frozenset[int]:
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return frozenset()
        self.reset()
        shapes = {output.shape for output in self.run().outputs.values() if output.is_floating_point()}
        leaves = enumerate(self.leaves)
        floats = {place: leaf.shape for place, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
        return frozenset(place for place, shape in floats.items() if shape in shapes)

    def enter(self, mode: Mode) -> None:
        """Run in this mode from now on."""
        self.module.train(mode == Mode.STEADY)

    def _is_repeatable(self, mode: Mode) -> bool:
        """True when two runs with different seeds return the same."""
        self.enter(mode)
        outputs = []
        for seed in (_SEED, _SEED + 1):
            self.reset()
            outputs.append(self.run(seed=seed).outputs)
        one, other = outputs
        return all(torch.equal(one[name], other[name]) for name in one)

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Give the parameters these values: of a DTensor all of it, else the part of this rank."""
        for name, parameter in self.module.named_parameters():
            value = parameters.get(name)
            if value is None:
                continue
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
            with torch.no_grad():
                local_part(parameter).copy_(value)

    def load_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Give buffers these values, now and before each run."""
        self._buffers |= buffers

    def give(self, inputs: Mapping[int, Tensor]) -> None:
        """Replace leaves of the arguments."""
        for place, value in inputs.items():
            self.leaves[place] = value.to(self.leaves[place].dtype).requires_grad_(self.leaves[place].requires_grad)

    def train_inputs(self, places: Collection[int]) -> None:
        """Follow the gradients of these inputs."""
        for place in places:
            self.leaves[place] = self.leaves[place].detach().requires_grad_()

    def run(self, *, grads: bool = False, seed: int | None = None) -> Run:
        """Call the program, and its backward pass; without a seed from the random state that `build` left."""
        torch.set_rng_state(self._random_state)
        if seed is not None:
            torch.manual_seed(seed)
        steady = Steady()
        stance = "force_eager" if self._force_eager else "default"
        leaves = []
        for leaf in self.leaves:
            is_tensor = isinstance(leaf, Tensor)
            leaves.append(leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf)
        arguments = tree_unflatten(leaves, self._spec)
        with torch.compiler.set_stance(stance), torch.set_grad_enabled(grads), steady:
            returned = self.module(**arguments) if isinstance(arguments, Mapping) else self.module(*arguments)
        found, _ = tree_flatten(returned)
        outputs = {f"output {number}": each for number, each in enumerate(found) if isinstance(each, Tensor)}
        of_all: dict[str, Tensor | None] = {}
        if grads:
            _run_backward(outputs)
            inner = dict(self.module.named_parameters()) | {f"input {place}": leaf for place, leaf in enumerate(leaves)}
            for name, each in inner.items():
                if isinstance(each, Tensor) and each.requires_grad:
                    of_all[name] = None if each.grad is None else _whole(each.grad)
        whole = {name: _whole(each).detach() for name, each in outputs.items()}
        if not grads:
            whole = {name: each.clone() for name, each in whole.items()}
        return Run(whole, of_all, steady.drawn)

    def reset(self) -> None:
        """Set gradients and buffers to what they were before all runs."""
        self.module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in self._state():
                if name in self._buffers and buffer.shape == self._buffers[name].shape:
                    local_part(buffer).copy_(local_part(self._buffers[name]))

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers, and tensors that modules have as plain attributes, such as a cache."""
        yield from self.module.named_buffers()
        for name, module in self.module.named_modules():
            for key, value in vars(module).items():
                is_own = isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and value.is_leaf
                if is_own and 0 not in value.stride():  # one that is expanded cannot be written
                    yield f"{name}.{key}", value


def cotangent(number: int, like: Tensor) -> Tensor:
    """The gradient of an output that its backward pass begins with: equal wherever its shape is."""
    generator = torch.Generator().manual_seed(_SEED + number)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype)


def drawn(known: Known, shape: Sequence[int], *, seed: int) -> Tensor:
    """Values for a parameter, spread as it is built, or a little where it is constant."""
    generator = torch.Generator().manual_seed(seed)
    deviation = known.deviation or _SPREAD
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64) * deviation + known.mean


def _run_backward(outputs: Outputs) -> None:
    roots, starts = [], []
    for number, output in enumerate(outputs.values()):
        if output.requires_grad and output.is_floating_point():
            roots.append(_whole(output))
            starts.append(cotangent(number, roots[-1]))
    if roots:
        torch.autograd.backward(roots, starts)


def _connected(place: Place) -> dist.ProcessGroup:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(place.rank), "LOCAL_RANK": str(place.rank), "WORLD_SIZE": str(place.size)}
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(place.store), place.size), rank=place.rank, world_size=place.size,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )  # fmt: skip
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@contextmanager
def _seeds_moved_by(number: int) -> Iterator[None]:
    """What a program draws after a seed of its own differs between two numbers; what it computes does not."""
    seeded = torch.manual_seed

    def moved(seed: int) -> torch.Generator:
        return seeded(seed + number)

    with mock.patch.object(torch, "manual_seed", moved), mock.patch.object(torch.random, "manual_seed", moved):
        yield


def _known(parameter: Tensor) -> Known:
    local = local_part(parameter).detach().double()
    is_spread = local.numel() > 1 and bool(local.std() > 0)
    return Known(
        tuple(local.shape),
        tuple(parameter.shape) if isinstance(parameter, DTensor) else None,
        parameter.requires_grad,
        0.0 if is_spread or not local.numel() else float(local.mean()),
        float(local.std()) if is_spread else 0.0,
    )


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
