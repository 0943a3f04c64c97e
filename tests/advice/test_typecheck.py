"""What the type check says to do: a faulty program, and the same one with that done, in which nothing is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck import broken
from tests.typecheck.broken import FAULTS, Fault
from tests.typecheck.programs import BIAS, LOCAL, PLAIN, TP, WIDTH, built, distributed_norm, mean_square
from tpcompile.collectives import api as collectives
from tpcompile.typecheck import Report, check_types


@dataclass(frozen=True)
class Repair:
    """A part of the fix of a fault, and what follows it."""

    fault: Callable[..., Any]
    says: str
    forward: Callable[..., Any] | None = None
    """None where only the declaration of the output changes."""
    output_type: str = ""


def hidden(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.comm.copy_to_tp(x), m.up)


def down(m: Any, x: Tensor) -> Tensor:
    """A partial sum."""
    return F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)


def bias_after_reduce(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(F.gelu(hidden(m, x)), m.down)) + m.bias


def reduced_before_gelu(m: Any, x: Tensor) -> Tensor:
    return F.gelu(m.comm.all_reduce(down(m, x)))


def scattered_before_gelu(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(F.gelu(m.comm.reduce_scatter(down(m, x), dim=0)), dim=0, dst="I")


def reduced(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(down(m, x))


def with_copy(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(hidden(m, x), m.down))


def statistic_copied(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    total = m.comm.copy_to_tp(m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="I"))
    return m.comm.all_reduce(F.linear(h * torch.rsqrt(total / WIDTH + 1e-6), m.down))


def statistic_with_a_summed_gradient(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    total = m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="R")
    return m.comm.all_reduce(F.linear(h * torch.rsqrt(total / WIDTH + 1e-6), m.down))


def global_layer_norm(m: Any, x: Tensor) -> Tensor:
    h, width = hidden(m, x), LOCAL * m.comm.size
    mean = m.comm.all_reduce(h.sum(-1, keepdim=True), dst="R") / width
    h = h - mean
    variance = m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="R") / width
    return m.comm.all_reduce(F.linear(h * torch.rsqrt(variance + 1e-6), m.down))


def global_softmax(m: Any, x: Tensor) -> Tensor:
    logits = hidden(m, x)
    top = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), group=m.comm.group, op="max")
    shifted = (logits - top).exp()
    total = m.comm.all_reduce(shifted.sum(-1, keepdim=True), dst="R")
    return m.comm.all_gather(shifted / total, dim=-1, dst="I")


def global_maximum(m: Any, x: Tensor) -> Tensor:
    logits = hidden(m, x)
    top = collectives.all_reduce(logits.detach().amax(-1, keepdim=True), group=m.comm.group, op="max")
    return m.comm.all_reduce((logits - top).exp().sum(-1))


def weighted_by_the_maximum(m: Any, x: Tensor) -> Tensor:
    logits = hidden(m, x)
    own = logits.detach().amax(-1, keepdim=True)
    top = collectives.all_reduce(own, group=m.comm.group, op="max")
    return m.comm.all_reduce(((logits - own).exp() * (own - top).exp()).sum(-1))


def stated_identity(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(F.linear(F.gelu(hidden(m, x)), m.down), group=m.comm.group, dst="I") + m.bias


def stated_and_returned(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(F.linear(F.gelu(hidden(m, x)), m.down), group=m.comm.group, dst="I")


def residual_copied(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(F.linear(F.gelu(hidden(m, x)), m.down), dst="R")
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x) + y, m.up), m.down))


def norm_copied(m: Any, x: Tensor) -> Tensor:
    q = hidden(m, x).unflatten(-1, (2, 4))
    q = q * torch.rsqrt(mean_square(q) + 1e-6) * m.comm.copy_to_tp(m.norm)
    return m.comm.all_reduce(F.linear(q.flatten(-2), m.down))


def with_sum(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(down(m, x), group=m.comm.group, op="sum")


def stated_source(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(m.comm.scatter(x, dim=-1, src="I"), dim=-1, dst="I")


def gathered(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(hidden(m, x), dim=-1, dst="I")


REPAIRS = (
    Repair(broken.bias_before_reduce, "all_reduce the partial sum first, then add", bias_after_reduce),
    Repair(broken.missing_reduce, "all_reduce (or reduce_scatter) the partial sum before", reduced_before_gelu),
    Repair(broken.missing_reduce, "(or reduce_scatter) the partial sum before this op", scattered_before_gelu),
    Repair(broken.partial_returned, "all_reduce (or reduce_scatter) it before it is returned", reduced),
    Repair(broken.partial_returned, "or declare the output as P", output_type="P"),
    Repair(broken.dropped_result, "use what it returns", reduced),
    Repair(broken.double_reduce, "reduce a partial sum once", reduced),
    Repair(broken.missing_copy, "pass the replicated tensor through copy_to_tp first", with_copy),
    Repair(broken.head_norm_without_copy, "pass the replicated tensor through copy_to_tp first", norm_copied),
    Repair(broken.double_copy, "call copy_to_tp once per replicated tensor", with_copy),
    Repair(broken.norm_with_replicated_gradient, "reduce it with dst='R'", statistic_with_a_summed_gradient),
    Repair(broken.norm_with_replicated_gradient, "or pass it through copy_to_tp", statistic_copied),
    Repair(broken.shard_local_norm, "make the statistic global first", distributed_norm),
    Repair(broken.fused_shard_local_norm, "use the distributed form", global_layer_norm),
    Repair(broken.local_softmax, "for a softmax all-reduce the maximum first", global_softmax),
    Repair(broken.local_maximum, "all-reduce the maximum first", global_maximum),
    Repair(broken.local_maximum, "or multiply by exp(local - global maximum)", weighted_by_the_maximum),
    Repair(broken.functional_row, "give the collective dst='I'", stated_identity),
    Repair(broken.functional_row_returned, "give the last collective dst='I'", stated_and_returned),
    Repair(broken.functional_row_returned, "or declare the output as R", output_type="R"),
    Repair(broken.row_with_summed_gradient, "pass the replicated tensor through copy_to_tp", residual_copied),
    Repair(broken.in_place_reduce, "use tpcompile.collectives", stated_and_returned),
    Repair(broken.wrong_op, "reduce it with sum", with_sum),
    Repair(broken.wrong_source, "pass src='I'", stated_source),
    Repair(broken.shard_returned, "all_gather it with dst='I'", gathered),
    Repair(broken.shard_returned, "or declare the output as V", output_type="V(-1)"),
)


# Faults that tests/typecheck/broken.py does not have; the output is what the program returns.


def over(m: Any, h: Tensor, squares: Tensor) -> Tensor:
    variance = squares / (h.shape[-1] * m.comm.size)
    return m.comm.all_reduce(F.linear(h * torch.rsqrt(variance + 1), m.down))


def around_own_means(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    squares = (h - h.mean(-1, keepdim=True)).square().sum(-1, keepdim=True)
    return over(m, h, m.comm.all_reduce(squares, dst="R"))


def around_the_global_mean(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    center = m.comm.all_reduce(h.sum(-1, keepdim=True), dst="R") / (h.shape[-1] * m.comm.size)
    return over(m, h, m.comm.all_reduce((h - center).square().sum(-1, keepdim=True), dst="R"))


def with_squares_of_the_means(m: Any, x: Tensor) -> Tensor:
    h = hidden(m, x)
    mean = h.mean(-1, keepdim=True)
    means = m.comm.all_gather(mean, dim=-1, dst="R")
    between = (means - means.mean(-1, keepdim=True)).square().sum(-1, keepdim=True) * h.shape[-1]
    within = m.comm.all_reduce((h - mean).square().sum(-1, keepdim=True), dst="R")
    return over(m, h, within + between)


def tokens(m: Any, x: Tensor) -> Tensor:
    """A shard of tokens of what is replicated."""
    return m.comm.scatter(x, dim=1, src="I")


def gathered_partial(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(down(m, x), dim=-1, dst="I")


def scattered_partial(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(m.comm.reduce_scatter(down(m, x), dim=0), dim=0, dst="I")


def gathered_replicated(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(x, dim=-1, dst="I")


def not_gathered(m: Any, x: Tensor) -> Tensor:
    return x * 1.0


def gathered_wrongly(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(hidden(m, x), dim=0, dst="I")


def means_added(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(hidden(m, x).mean(-1))


def means_averaged(m: Any, x: Tensor) -> Tensor:
    return collectives.all_reduce(hidden(m, x).mean(-1), group=m.comm.group, op="avg")


def means_divided(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(hidden(m, x).mean(-1)) / m.comm.size


def shards_added(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(hidden(m, x))


def running_sum(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(tokens(m, x).cumsum(1), dim=1, dst="I")


def running_sum_gathered(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(tokens(m, x), dim=1, dst="I").cumsum(1)


def rolled(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(tokens(m, x).roll(1, 1), dim=1, dst="I")


def rolled_gathered(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(tokens(m, x), dim=1, dst="I").roll(1, 1)


def two_layouts(m: Any, x: Tensor) -> Tensor:
    return m.comm.scatter(x, dim=0, src="I")[..., :1] * m.comm.scatter(x, dim=2, src="I")[:1]


def one_layout(m: Any, x: Tensor) -> Tensor:
    whole = m.comm.all_gather(m.comm.scatter(x, dim=2, src="I"), dim=2, dst="R")
    return m.comm.all_gather(m.comm.scatter(x, dim=0, src="I")[..., :1] * whole[:1], dim=0, dst="I")


def causal(m: Any, x: Tensor) -> Tensor:
    x = x.unsqueeze(1)
    q = m.comm.scatter(x, dim=2, src="I")
    o = F.scaled_dot_product_attention(q, m.comm.copy_to_tp(x), m.comm.copy_to_tp(x), is_causal=True)
    return m.comm.all_gather(o, dim=2, dst="I")


def causal_by_position(m: Any, x: Tensor) -> Tensor:
    x = x.unsqueeze(1)
    q = m.comm.scatter(x, dim=2, src="I")
    keys = torch.arange(x.shape[2], device=x.device)
    queries = torch.arange(q.shape[2], device=x.device) + m.comm.rank_index(x.device) * q.shape[2]
    mask = keys <= queries.unsqueeze(-1)
    o = F.scaled_dot_product_attention(q, m.comm.copy_to_tp(x), m.comm.copy_to_tp(x), attn_mask=mask)
    return m.comm.all_gather(o, dim=2, dst="I")


def attends_to_own_keys(m: Any, x: Tensor) -> Tensor:
    x = tokens(m, x).unsqueeze(1)
    return m.comm.all_gather(F.scaled_dot_product_attention(x, x, x), dim=2, dst="I")


def attends_to_all_keys(m: Any, x: Tensor) -> Tensor:
    x = tokens(m, x).unsqueeze(1)
    keys = m.comm.all_gather(x, dim=2, dst="R")
    return m.comm.all_gather(F.scaled_dot_product_attention(x, keys, keys), dim=2, dst="I")


def triangle(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(tokens(m, x).tril(), dim=1, dst="I")


def triangle_by_position(m: Any, x: Tensor) -> Tensor:
    own = tokens(m, x)
    rows = torch.arange(own.shape[1], device=x.device) + m.comm.rank_index(x.device) * own.shape[1]
    is_below = torch.arange(own.shape[2], device=x.device) <= rows.unsqueeze(-1)
    return m.comm.all_gather(torch.where(is_below, own, 0.0), dim=1, dst="I")


def beside_a_region(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x) + x, m.up), m.down))


def inside_a_region(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x) + m.comm.copy_to_tp(x * 2), m.up), m.down))


def reduced_without_gradient(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.comm.all_reduce(down(m, x))
    return y + x


def reduced_with_gradient(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_reduce(down(m, x)) + x


def scaled_without_gradient(m: Any, x: Tensor) -> Tensor:
    return x * m.bias.detach()


def scaled_with_gradient(m: Any, x: Tensor) -> Tensor:
    return x * m.bias


def own(forward: Callable[..., Any]) -> Fault:
    return Fault("", "", forward, PLAIN | {"bias": BIAS})


OWN = (
    Repair(gathered_partial, "all_reduce a partial sum", reduced),
    Repair(gathered_partial, "or reduce_scatter it", scattered_partial),
    Repair(gathered_replicated, "leave the gather out", not_gathered),
    Repair(gathered_replicated, "or gather the shard", gathered),
    Repair(gathered_wrongly, "gather along dim 2", gathered),
    Repair(around_own_means, "make the mean global first", around_the_global_mean),
    Repair(around_own_means, "those of the gathered means around the global one", with_squares_of_the_means),
    Repair(means_added, "reduce it with op='avg'", means_averaged),
    Repair(means_added, "divide it by the number of ranks", means_divided),
    Repair(shards_added, "all_gather the shard", gathered),
    Repair(shards_added, "or reduce the partial result of the op that contracts the sharded dim", reduced),
    Repair(running_sum, "or gather first", running_sum_gathered),
    Repair(rolled, "or all_gather along the dim first", rolled_gathered),
    Repair(two_layouts, "all_gather one of them", one_layout),
    Repair(causal, "pass a mask made from global positions", causal_by_position),
    Repair(attends_to_own_keys, "all_gather keys and values along the tokens", attends_to_all_keys),
    Repair(triangle, "compare global positions", triangle_by_position),
    Repair(beside_a_region, "copy_to_tp as well", inside_a_region),
    Repair(reduced_without_gradient, "reduce with a stated gradient", reduced_with_gradient),
    Repair(scaled_without_gradient, "call it outside of no_grad and without detach", scaled_with_gradient),
)


def checked(fault: Fault) -> Report:
    layouts = dict(fault.layouts)
    if fault.forward is distributed_norm:
        layouts["norm"] = ((LOCAL,), 0)
    x = torch.ones(2 * TP, 2 * TP, WIDTH)
    types = {"input_types": (fault.input_type,), "output_type": fault.output_type}
    return check_types(built(fault.forward, **layouts), (x,), tp=TP, **types)  # type: ignore[arg-type]


@pytest.mark.parametrize("repair", (*REPAIRS, *OWN), ids=lambda one: f"{one.fault.__name__}: {one.says}")
def test_the_advice_turns_red_into_green(repair: Repair) -> None:
    fault = next((one for one in FAULTS if one.forward is repair.fault), own(repair.fault))
    finding = checked(fault).finding
    assert finding is not None and repair.says in finding.fix, str(finding)
    followed = replace(
        fault, forward=repair.forward or fault.forward, output_type=repair.output_type or fault.output_type
    )
    checked(followed).raise_on_violation(strict=True)
