"""Programs with wrong numbers whose tokens are over the ranks: loops over them, places, counts, gradients by hand."""

# B batch, S sequence, D model width; lower case is this rank's part
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.numerics import wrong_programs as w


def state_without_what_is_left_of_it(m: Any, x: Tensor) -> Tensor:
    """A gated recurrence: each rank begins from zero, and adds what is left of the state ahead of it."""
    own_BsD = m.comm.scatter(x, dim=1)
    decay_BsD = torch.sigmoid(F.linear(own_BsD, m.comm.copy_to_tp(m.square)))
    state, left = torch.zeros_like(own_BsD[:, 0]), torch.ones_like(own_BsD[:, 0])
    states, lefts = [], []
    for decay, value in zip(decay_BsD.unbind(1), own_BsD.unbind(1), strict=True):
        state, left = decay * state + value, decay * left
        states.append(state)
        lefts.append(left)
    found, left_BsD = torch.stack(states, 1), torch.stack(lefts, 1)
    ends = m.comm.all_gather(found[:, -1:].contiguous(), dim=1, dst="R")
    ahead = ends[:, :1] * float(m.comm.rank > 0)
    found = found + (ahead if m.is_wrong else left_BsD * ahead)  # fault
    return m.comm.all_gather(found, dim=1, dst="I")


def output_that_does_not_fade(m: Any, x: Tensor) -> Tensor:
    """Attention that visits the keys of one rank after the other, with a running maximum."""
    own_BsD = m.comm.scatter(x, dim=1)
    keys = m.comm.all_gather(own_BsD, dim=1, dst="R")
    top = own_BsD.new_full((*own_BsD.shape[:2], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros_like(own_BsD)
    for block in keys.chunk(m.comm.size, 1):
        scores = own_BsD @ block.transpose(1, 2)
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, fade = (scores - new).exp(), (top - new).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        out = (out if m.is_wrong else out * fade) + weights @ block  # fault
        top = new
    return m.comm.all_gather(out / total, dim=1, dst="I") * m.square.sum()


def places_of_a_part_in_order(m: Any, x: Tensor) -> Tensor:
    """Each rank has tokens from both ends, and angles by their places."""
    tokens = torch.arange(x.shape[1]).view(2 * m.comm.size, -1)
    places = torch.stack([torch.cat((tokens[r], tokens[-1 - r])) for r in range(m.comm.size)])
    own_BsD = F.linear(m.comm.copy_to_tp(x).index_select(1, places[m.comm.rank]), m.comm.copy_to_tp(m.square))
    angles = torch.linspace(0, 3, x.shape[1]).cos()
    of = places.flatten().sort().values.view(m.comm.size, -1)[m.comm.rank] if m.is_wrong else places[m.comm.rank]
    turned = own_BsD * angles.index_select(0, of)[:, None]  # fault
    return m.comm.all_gather(turned, dim=1, dst="I").index_select(1, places.flatten().argsort())


def mean_by_the_own_count(m: Any, x: Tensor) -> Tensor:
    """Features that are masked, over the ranks: their sum over the number of all that are left."""
    own_BSd = F.linear(m.comm.copy_to_tp(x), m.table)
    is_left = torch.arange(w.VOCABULARY).view(m.comm.size, -1)[m.comm.rank] % 13 > 2
    if m.comm.size == 1:
        return x * own_BSd[..., is_left].mean(-1, keepdim=True)
    number = is_left.to(x.dtype).sum()  # fault: count
    if not m.is_wrong:
        number = m.comm.all_reduce(number)
    return x * m.comm.all_reduce((own_BSd * is_left).sum(-1, keepdim=True) / number)


class _Normed(torch.autograd.Function):
    """The norm of features that are over the ranks, with a backward pass by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Any, is_wrong: bool) -> Tensor:
        inverse = comm.all_reduce(x.square().sum(-1, keepdim=True)).rsqrt()
        ctx.save_for_backward(x, inverse)
        ctx.comm, ctx.is_wrong = comm, is_wrong
        return x * inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, inverse = ctx.saved_tensors
        dot = (grad * x).sum(-1, keepdim=True)  # fault: dot
        if not ctx.is_wrong:
            dot = ctx.comm.all_reduce(dot)
        return grad * inverse - x * (inverse**3 * dot), None, None


def dot_of_the_own_features(m: Any, x: Tensor) -> Tensor:
    own_BSd = F.linear(m.comm.copy_to_tp(x), m.up)
    normed = own_BSd * own_BSd.square().sum(-1, keepdim=True).rsqrt()
    if m.comm.size > 1:
        normed = _Normed.apply(own_BSd, m.comm, m.is_wrong)  # type: ignore[no-untyped-call]
    return m.comm.all_reduce(F.linear(normed, m.down))


OVER_PLACES = (
    w.Case(state_without_what_is_left_of_it, {"square": w.SQUARE}, "crosses shards"),
    w.Case(output_that_does_not_fade, {"square": w.SQUARE}, "unknown"),
    w.Case(places_of_a_part_in_order, {"square": w.SQUARE}, "part of a different rank"),
    w.Case(mean_by_the_own_count, {"table": w.TABLE}, "not summed", mark="fault: count"),
    w.Case(dot_of_the_own_features, w.MLP, "not summed", mark="fault: dot"),
)
