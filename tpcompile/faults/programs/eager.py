"""Collectives in eager code around compiled code: under a local condition, in another order, of other sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tpcompile.collectives import api as collectives
from tpcompile.faults.context import Context

# B batch, D features, T tokens of this rank; all tensors are plain local ones.


def _layer(context: Context) -> Callable[[Tensor], Tensor]:
    w_DD, group = context.randn(16, 16), context.group

    def layer(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    return torch.compile(layer, backend=context.backend, dynamic=False)


def debug_same_size(context: Context) -> None:
    """Somebody sums a tensor on one rank to look at it; its size is that of the next collective, which takes it."""
    layer = _layer(context)
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        if context.faulty(step):
            dist.all_reduce(y_BD, group=context.group)  # fault: debug sum
        _ = y_BD.sum().item()


def debug_barrier(context: Context) -> None:
    """A barrier on one rank, for a profile."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            dist.barrier(context.group)  # fault: barrier
        _ = layer(context.randn(8, 16)).sum().item()


def local_state(context: Context) -> None:
    """A scheduler that shares its queue only while it has requests, and one rank has some left."""
    layer = _layer(context)
    queue = torch.zeros(4, dtype=torch.int64, device=context.device)
    for step in range(context.num_steps):
        ongoing = ["request"] if context.faulty(step) else []
        if ongoing:
            dist.broadcast(queue, src=1, group=context.group)  # fault: local state
        _ = layer(context.randn(8, 16)).sum().item()


def order_of_groups(context: Context) -> None:
    """Gradients and statistics are reduced in two groups, in opposite order on the two ranks."""
    layer = _layer(context)
    groups = [dist.new_group(group_desc=name) for name in ("gradients", "statistics")]
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        is_reversed = context.faulty(step) and context.rank == 1
        for group in reversed(groups) if is_reversed else groups:
            dist.all_reduce(y_BD, group=group)  # fault: order of eager groups


def eager_training(context: Context) -> None:
    """Training with a collective in the forward and one in the backward; one rank does not compile."""
    w_DD, group = context.randn(16, 16, requires_grad=True), context.group

    def layer(x_BD: Tensor) -> Tensor:
        h_BD = collectives.copy_to_tp(x_BD, group=group)
        return collectives.all_reduce((h_BD @ w_DD).relu(), group=group)

    program = layer if context.diverges else torch.compile(layer, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        program(context.randn(8, 16, requires_grad=True)).sum().backward()  # fault: training without compiling


def hook(context: Context) -> None:
    """A gradient hook with a collective, registered on one rank only at a later step."""
    model, group = nn.Linear(16, 16, device=context.device), context.group

    def reduce_gradient(parameter: Tensor) -> None:
        dist.all_reduce(parameter.grad, group=group)  # fault: hook

    @torch.compile(backend=context.backend, dynamic=False)
    def forward(x_BD: Tensor) -> Tensor:
        return collectives.all_reduce(model(x_BD), group=group).square().mean()

    for step in range(context.num_steps):
        if context.faulty(step):
            model.weight.register_post_accumulate_grad_hook(reduce_gradient)
        forward(context.randn(8, 16)).backward()


def split_sizes(context: Context) -> None:
    """Tokens go to their experts by counts of every rank, and one rank expects too few."""
    layer = _layer(context)
    for step in range(context.num_steps):
        tokens_TD = layer(context.randn(8, 16))
        counts_to_send = torch.tensor([4, 4])
        counts_to_receive = torch.tensor([2, 4] if context.faulty(step) else [4, 4])
        received_TD = tokens_TD.new_empty(int(counts_to_receive.sum().item()), 16)
        sizes = counts_to_receive.tolist(), counts_to_send.tolist()
        dist.all_to_all_single(received_TD, tokens_TD, *sizes, group=context.group)  # fault: split sizes
        _ = received_TD.sum().item()


def missing_receive(context: Context) -> None:
    """Rank 0 sends at every step, and at one of them the other rank does not receive."""
    layer = _layer(context)
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        if context.rank == 0:
            dist.send(y_BD, 1, group=context.group)  # blamed: the send nobody receives
        elif not context.faulty(step):
            dist.recv(y_BD, 0, group=context.group)


def _sleep_at(context: Context, step: int) -> None:
    """Rank 1 is slow at the last step: rank 0 asks what it does, and nothing is wrong."""
    if context.rank == 1 and step == context.num_steps - 1:
        time.sleep(9)


def lines_of_broadcast(context: Context) -> None:
    """Healthy: source and receivers call the same broadcast on lines of their own, and a rank is slow."""
    layer = _layer(context)
    x_BD = context.randn(8, 16)
    for step in range(context.num_steps):
        if context.rank == 0:
            x_BD = context.randn(8, 16)
            dist.broadcast(x_BD, src=0, group=context.group)
        else:
            dist.broadcast(x_BD, src=0, group=context.group)
        _sleep_at(context, step)
        _ = layer(x_BD).sum().item()


def uneven_all_to_all(context: Context) -> None:
    """Healthy: ranks send other numbers of tokens, as the receivers know, and a rank is slow."""
    layer = _layer(context)
    to_send = [[1, 2], [3, 4]][context.rank]
    to_receive = [[1, 3], [2, 4]][context.rank]
    for step in range(context.num_steps):
        tokens_TD = context.randn(sum(to_send), 16)
        received_TD = tokens_TD.new_empty(sum(to_receive), 16)
        dist.all_to_all_single(received_TD, tokens_TD, to_receive, to_send, group=context.group)
        _sleep_at(context, step)
        _ = layer(context.randn(8, 16)).sum().item() + received_TD.sum().item()


def scattered_batch(context: Context) -> None:
    """Healthy: rank 0 scatters the batch, so only it has inputs, and a rank is slow."""
    layer = _layer(context)
    for step in range(context.num_steps):
        x_BD = context.randn(8, 16)
        parts = [x_BD + rank for rank in range(context.world_size)] if context.rank == 0 else None
        dist.scatter(x_BD, parts, src=0, group=context.group)
        _sleep_at(context, step)
        _ = layer(x_BD).sum().item()
