"""Collectives in eager code around compiled code: under a local condition, in a different order, of different sizes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.faults.case import fault, healthy
from tests.faults.context import Context
from tpcompile.collectives import api as collectives
from tpcompile.evidence.records.causes import Cause

# B batch, D features, T tokens of this rank; all tensors are plain local ones.

_LOCAL = "sglang#26921, sglang#26923: TP=8 hangs after hours, a collective under local state"
_ORDER = "pytorch#75373: ranks that execute different modules hang or compute wrong results"
_SIZES = "torchtitan#1649, torchtitan#1640: some ranks hang, sizes of MoE depend on the data"
_LATE = "pytorch#108971: NCCL timeouts, some ranks arrive later"


def _layer(context: Context) -> Callable[[Tensor], Tensor]:
    w_DD, group = context.randn(16, 16), context.group

    def layer(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD @ w_DD, "sum", group) + 1

    return torch.compile(layer, backend=context.backend, dynamic=False)


@fault(
    Cause.STUCK_COLLECTIVE,
    _LOCAL,
    "unslothai/unsloth-zoo#967: after a desync a collective returned garbage",
    marker="# fault: debug sum",
    step=2,
)
def debug_same_size(context: Context) -> None:
    """Rank 1 sums a tensor at step 2: rank 0's next collective matches it, and rank 1 hangs in its last one."""
    layer = _layer(context)
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        if context.faulty(step):
            dist.all_reduce(y_BD, group=context.group)  # fault: debug sum
        _ = y_BD.sum().item()


@fault(
    Cause.STUCK_COLLECTIVE,
    _LOCAL,
    "pytorch#189454: a compiled recv and a barrier in a different order hang",
    marker="# fault: barrier",
    step=2,
)
def debug_barrier(context: Context) -> None:
    """Rank 1 enters a barrier at step 2."""
    layer = _layer(context)
    for step in range(context.num_steps):
        if context.faulty(step):
            dist.barrier(context.group)  # fault: barrier
        _ = layer(context.randn(8, 16)).sum().item()


@fault(Cause.STUCK_COLLECTIVE, _LOCAL, marker="# fault: local state", step=2)
def local_state(context: Context) -> None:
    """Rank 1 has requests in its queue at step 2 and broadcasts the queue; rank 0 has none."""
    layer = _layer(context)
    queue = torch.zeros(4, dtype=torch.int64, device=context.device)
    for step in range(context.num_steps):
        ongoing = ["request"] if context.faulty(step) else []
        if ongoing:
            dist.broadcast(queue, src=1, group=context.group)  # fault: local state
        _ = layer(context.randn(8, 16)).sum().item()


@fault(
    Cause.GROUP,
    "torchrec#4149: 64 ranks deadlock, circular wait across two groups",
    ranks=(0, 1),
    marker="# fault: order of eager groups",
    step=2,
)
def order_of_groups(context: Context) -> None:
    """Eager all-reduces in two groups, in opposite order on the two ranks at step 2."""
    layer = _layer(context)
    groups = [dist.new_group(group_desc=name) for name in ("gradients", "statistics")]
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        is_reversed = context.faulty(step) and context.rank == 1
        for group in reversed(groups) if is_reversed else groups:
            dist.all_reduce(y_BD, group=group)  # fault: order of eager groups


@fault(
    Cause.COMPILE_DISABLED,
    "torchtitan#1649: one feature turned off on the ranks that hang",
    marker="# fault: training without compiling",
)
def eager_training(context: Context) -> None:
    """Rank 1 trains without compiling."""
    w_DD, group = context.randn(16, 16, requires_grad=True), context.group

    def layer(x_BD: Tensor) -> Tensor:
        h_BD = collectives.copy_to_tp(x_BD, group=group)
        return collectives.all_reduce((h_BD @ w_DD).relu(), group=group)

    program = layer if context.diverges else torch.compile(layer, backend=context.backend, dynamic=False)
    for step in range(context.num_steps):
        context.faulty(step)
        program(context.randn(8, 16, requires_grad=True)).sum().backward()  # fault: training without compiling


@fault(Cause.STUCK_COLLECTIVE, _ORDER, marker="# fault: hook", step=2)
def hook(context: Context) -> None:
    """Rank 1 gets a gradient hook with a collective at step 2."""
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


@fault(Cause.COLLECTIVE_SIZES, _SIZES, marker="# fault: split sizes", step=2, named=(0, 1), on_gpus=False)
def eager_split_sizes(context: Context) -> None:
    """Rank 1 expects different split sizes than rank 0 sends, in an eager all-to-all at step 2."""
    layer = _layer(context)
    for step in range(context.num_steps):
        tokens_TD = layer(context.randn(8, 16))
        counts_to_send = torch.tensor([4, 4])
        counts_to_receive = torch.tensor([2, 4] if context.faulty(step) else [4, 4])
        received_TD = tokens_TD.new_empty(int(counts_to_receive.sum().item()), 16)
        sizes = counts_to_receive.tolist(), counts_to_send.tolist()
        dist.all_to_all_single(received_TD, tokens_TD, *sizes, group=context.group)  # fault: split sizes
        _ = received_TD.sum().item()


@fault(
    Cause.STUCK_COLLECTIVE,
    "pytorch#189454, torchcomms#3095: send and recv in a different order hang every night",
    marker="# blamed: what it does not receive",
    step=2,
    on_gpus=False,
)
def missing_receive(context: Context) -> None:
    """Rank 1 does not receive what rank 0 sends at step 2."""
    layer = _layer(context)
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        if context.rank == 0:
            dist.send(y_BD, 1, group=context.group)
        elif not context.faulty(step):
            dist.recv(y_BD, 0, group=context.group)  # blamed: what it does not receive


def _swap(context: Context, x_BD: Tensor) -> Tensor:
    """What the other rank has; each rank begins with what it sends or with what it receives."""
    other, received_BD = 1 - context.rank, torch.empty_like(x_BD)
    ops = [
        dist.P2POp(dist.isend, x_BD, other, group=context.group),
        dist.P2POp(dist.irecv, received_BD, other, group=context.group),
    ]
    if context.rank:
        ops.reverse()
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received_BD


@fault(
    Cause.STUCK_COLLECTIVE,
    "pytorch#189454, torchcomms#3095: send and recv in a different order hang every night",
    marker="# blamed: what it does not swap",
    step=2,
    on_gpus=False,
)
def missing_swap(context: Context) -> None:
    """Rank 1 does not take part in the batched sends and receives at step 2."""
    layer = _layer(context)
    for step in range(context.num_steps):
        y_BD = layer(context.randn(8, 16))
        if not context.faulty(step):
            y_BD = _swap(context, y_BD)  # blamed: what it does not swap
        _ = y_BD.sum().item()


@healthy(_LATE)
def swaps(context: Context) -> None:
    """Healthy: ranks send and receive in opposite orders, and rank 1 is 9 s late."""
    layer = _layer(context)
    for step in range(context.num_steps):
        _ = _swap(context, layer(context.randn(8, 16))).sum().item()
        _sleep_at(context, step)


def _sleep_at(context: Context, step: int) -> None:
    """Rank 1 is slow at the last step, so that rank 0 asks for its state; nothing is wrong."""
    if context.rank == 1 and step == context.num_steps - 1:
        time.sleep(9)


@healthy(_LATE)
def lines_of_broadcast(context: Context) -> None:
    """Healthy: source and receivers call broadcast on different lines, and rank 1 is 9 s late."""
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


@healthy(_SIZES, "pytorch#189330: MoE all-to-all")
def uneven_all_to_all(context: Context) -> None:
    """Healthy: ranks send different numbers of tokens, as agreed, and rank 1 is 9 s late."""
    layer = _layer(context)
    to_send = [[1, 2], [3, 4]][context.rank]
    to_receive = [[1, 3], [2, 4]][context.rank]
    for step in range(context.num_steps):
        tokens_TD = context.randn(sum(to_send), 16)
        received_TD = tokens_TD.new_empty(sum(to_receive), 16)
        dist.all_to_all_single(received_TD, tokens_TD, to_receive, to_send, group=context.group)
        _sleep_at(context, step)
        _ = layer(context.randn(8, 16)).sum().item() + received_TD.sum().item()


@healthy(_LATE)
def scattered_batch(context: Context) -> None:
    """Healthy: rank 0 scatters the batch, and rank 1 is 9 s late."""
    layer = _layer(context)
    for step in range(context.num_steps):
        x_BD = context.randn(8, 16)
        parts = [x_BD + rank for rank in range(context.world_size)] if context.rank == 0 else None
        dist.scatter(x_BD, parts, src=0, group=context.group)
        _sleep_at(context, step)
        _ = layer(x_BD).sum().item()
