"""Runs of a target and of its reference -> the same tensors of each by name, as far as this rank has them.

Where a step trains, these are the gradients that the optimizer is given, its state and the weights after it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from tpcompile.gate import outputs
from tpcompile.numerics import error_ratio
from tpcompile.numerics.draw import drawing_alike
from tpcompile.numerics.optimizer_step import WEIGHT, Of, buffers_put_back, followed
from tpcompile.numerics.rows import Rows, all_rows
from tpcompile.target import Target


@dataclass(frozen=True)
class Ran:
    """What one call returned; where it took a step, what that made of the parameters, and what these were before."""

    returned: outputs.Outputs
    made: Mapping[Of, Tensor] = field(default_factory=dict)
    before: outputs.Outputs = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    """Names of the parameters that an optimizer of torch has."""

    @property
    def trains(self) -> bool:
        """True where a step changed weights, on any rank."""
        return bool(self.before)

    @property
    def named(self) -> dict[str, Tensor]:
        """All that is compared."""
        return {**self.returned, **{_name(of): tensor for of, tensor in self.made.items()}}


@dataclass(frozen=True)
class Compared:
    """Tensors of this rank's runs and of those on one device, each with the same names and shapes."""

    own: Sequence[outputs.Outputs]
    single: outputs.Outputs
    exact: outputs.Outputs
    normal: Mapping[str, float]
    """Single-device error of each whole tensor of a step."""
    left_out: tuple[str, ...]
    """Parameters that are no rows of the reference's, and state of one that is no part of the reference's."""


def run_step(target: Target, program: object, call: Callable[[], object], *, trains: Callable[[bool], bool]) -> Ran:
    """Call it, and put back what the step changed. `trains` is asked with the own answer and says that of all ranks."""
    is_named = isinstance(target.program, nn.Module)  # else the names are places in the optimizer
    module = program if is_named and isinstance(program, nn.Module) else None
    if target.step is None:
        with drawing_alike(), buffers_put_back(module):
            return Ran(outputs.kept(call()))
    with drawing_alike(), followed(module) as step:
        returned = outputs.kept(call())
        if not trains(step.has_changed):
            return Ran(returned)
        made = {of: tensor.clone() for of, tensor in step.made().items()}
        return Ran(returned, made, step.weights_before(), step.held)


def comparable(own: Sequence[Ran], single: Ran, exact: Ran, *, rank: int, size: int) -> Compared:
    """Take of the reference's tensors the rows that the rank has; all ranks must call it alike.

    What optimizers of torch are given and keep of a parameter is compared where one has it in each run: one by hand
    says nothing of it, and one of replicas may have parts of several in a parameter of its own.
    """
    held = frozenset.intersection(*(ran.held for ran in (*own, single)))
    own, single, exact = [_of_held(ran, held) for ran in own], _of_held(single, held), _of_held(exact, held)
    rows = all_rows(outputs.whole(own[0].before), single.before, rank=rank, size=size)
    left_out = sorted(set(own[0].before) ^ set(single.before) | (set(own[0].before) - set(rows)))
    both = [of for of in single.made if of in exact.made and single.made[of].shape == exact.made[of].shape]
    normal = {_name(of): error_ratio.relative(single.made[of], exact.made[of]) for of in both}

    parts = {
        of: _part_of_rank(rows[of[1]], exact.before[of[1]].shape, exact.made[of], own[0].made[of])
        for of in both
        if of in own[0].made and of[1] in rows
    }
    known = {of: part for of, part in parts.items() if part is not None}
    left_out += [" of ".join(of) for of in parts if of not in known]

    def is_compared(of: Of) -> bool:
        return of[1] in rows and (of in known or of not in parts)

    def of_single(ran: Ran) -> dict[str, Tensor]:
        made = {of: known.get(of, _whole)(tensor) for of, tensor in ran.made.items() if is_compared(of)}
        return Ran(ran.returned, made).named

    of_own = [Ran(ran.returned, {of: made for of, made in ran.made.items() if is_compared(of)}).named for ran in own]
    return Compared(of_own, of_single(single), of_single(exact), normal, tuple(left_out))


def spread_of(
    moved: Iterable[outputs.Outputs], exact: outputs.Outputs, normal: Mapping[str, float]
) -> dict[str, float]:
    """The normal error of each tensor: the largest among one run and runs whose numbers are moved a little."""
    found = dict(normal)
    for run in moved:
        for name, tensor in run.items():
            if name in exact and tensor.shape == exact[name].shape:
                found[name] = max(found.get(name, 0.0), error_ratio.relative(tensor, exact[name]))
    return found


def _of_held(ran: Ran, held: Collection[str]) -> Ran:
    """Weights, and the rest of those parameters that are `held`."""
    return replace(ran, made={of: tensor for of, tensor in ran.made.items() if of[0] == WEIGHT or of[1] in held})


def _part_of_rank(rows: Rows, parameter: torch.Size, full: Tensor, own: Tensor) -> Callable[[Tensor], Tensor] | None:
    """What takes a rank's part of a tensor that is kept of a parameter with that shape; None where it is not known.

    Of one with the parameter's shape its rows; of one that is as long in one dim only, such as the mean of each row,
    the same places there; of what is spread flat over replicas the part that is nearest. Any other, such as a number,
    is whole on each rank.
    """
    taken = rows.of if full.shape == parameter else _whole
    part = taken(full)
    if part.shape == own.shape:
        return taken
    if rows.index is not None and full.dim() == own.dim():
        dims = [dim for dim, lengths in enumerate(zip(full.shape, own.shape, strict=True)) if len(set(lengths)) > 1]
        if len(dims) == 1 and (full.shape[dims[0]], own.shape[dims[0]]) == (rows.length, len(rows.index)):
            return replace(rows, dim=dims[0]).of
    length = own.numel()
    if own.dim() != 1 or not length or part.numel() % length:
        return None
    place = int((part.reshape(-1, length) - own.to(part)).square().sum(1).argmin())
    return lambda tensor: taken(tensor).reshape(-1, length)[place]


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _name(of: Of) -> str:
    what, parameter = of
    return f"forward {what} of {parameter}"
