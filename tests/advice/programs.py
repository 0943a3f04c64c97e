"""For each sentence of advice a program that goes wrong on rank 1, and does not where the sentence is followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.advice.played import Rank, advised, suggested
from tests.faults.planted.collectives import _SumGradient
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.compile import TaintKind

# B batch, D features


def compiled(program: Callable[..., Any], backend: str = "eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(program, backend=backend, **options)


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(shape or (8, 4), **options)


def double(x_BD: Tensor) -> Tensor:
    return x_BD * 2


def summed_over(group: Any) -> Callable[[Tensor], Tensor]:
    def block(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD, "sum", group) + 1

    return block


class Tied(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        if is_tied:
            self.down.weight = self.up.weight

    def forward(self, x_BD: Tensor) -> Tensor:
        return self.down(self.up(x_BD))


# The traced program.


@advised(Cause.RANK_BRANCH, 0)
def logging_moved_out(at: Rank) -> None:
    def logging(x_BD: Tensor) -> Tensor:
        y_BD = x_BD * 2
        if dist.get_rank() == 1:
            y_BD = y_BD + y_BD.mean()
        return y_BD

    y_BD = compiled(double if at.follows else logging)(ones())
    if at.rank == 1:
        y_BD.mean()


@advised(Cause.RANK_BRANCH, 1)
def both_branches(at: Rank) -> None:
    is_first = torch.tensor(at.rank == 0)

    def branching(x_BD: Tensor) -> Tensor:
        return x_BD.sin() if dist.get_rank() == 0 else x_BD.cos()

    def choosing(x_BD: Tensor) -> Tensor:
        return torch.where(is_first, x_BD.sin(), x_BD.cos())

    compiled(choosing if at.follows else branching)(ones())


def _scaled_by_rank(x_BD: Tensor) -> Tensor:
    return x_BD * dist.get_rank()


@advised(Cause.RANK_CONSTANT, 0)
def number_in_a_tensor(at: Rank) -> None:
    scale = torch.tensor(float(at.rank))
    compiled((lambda x_BD: x_BD * scale) if at.follows else _scaled_by_rank)(ones())


@advised(Cause.RANK_CONSTANT, 1, allowed=(("graph", "mul(", "positions of this rank"),))
def number_declared(at: Rank) -> None:
    compiled(_scaled_by_rank)(ones())


@advised(Cause.GRAPH_BREAK)
def print_removed(at: Rank) -> None:
    prints = at.is_odd

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD * 2
        if prints:
            torch._dynamo.graph_break()
        return y_BD.sin()

    compiled(block)(ones())


@advised(Cause.COMPILE_DISABLED)
def compiled_everywhere(at: Rank) -> None:
    block = summed_over(at.group)
    (block if at.is_odd else compiled(block))(ones())


@advised(Cause.EXTRA_COMPILE)
def called_everywhere(at: Rank) -> None:
    compiled(double)(ones())
    statistics = compiled(summed_over(at.group))
    if at.rank == 1 or at.follows:
        statistics(ones())


@advised(Cause.RECOMPILE_LIMIT)
def number_passed_as_a_tensor(at: Rank) -> None:
    block = compiled(lambda x_BD, scale: x_BD * scale, dynamic=False)
    scales = [0.0, 1.0, 2.0] if at.rank == 1 else [0.0, 1.0]
    with torch._dynamo.config.patch(recompile_limit=2):
        for scale in scales:
            block(ones(), torch.tensor(scale) if at.follows else scale)


@advised(Cause.BACKEND)
def one_backend(at: Rank) -> None:
    compiled(double, "eager" if at.is_odd else "aot_eager")(ones())


@advised(Cause.REGIONAL_COMPILE)
def the_same_modules(at: Rank) -> None:
    model = Tied(is_tied=False)
    if at.is_odd:
        model.up, model.down = compiled(model.up), compiled(model.down)
    (model if at.is_odd else compiled(model))(ones())


# Inputs of the compiled region.


@advised(Cause.SHAPE, 0)
def padded(at: Rank) -> None:
    x_BD = ones(6 if at.rank == 1 else 8, 4)
    if at.follows:
        x_BD = torch.nn.functional.pad(x_BD, (0, 0, 0, 8 - x_BD.shape[0]))
    compiled(double, dynamic=False)(x_BD)


@advised(Cause.SHAPE, 1)
def marked_dynamic(at: Rank) -> None:
    block = compiled(double)
    first_BD, second_BD = ones(), ones(6 if at.rank == 1 else 8, 4)
    if at.follows:
        torch._dynamo.mark_dynamic(first_BD, 0)
    block(first_BD)
    block(second_BD)


@advised(Cause.STRIDE)
def contiguous(at: Rank) -> None:
    x_BD = ones(4, 8).t() if at.rank == 1 else ones()
    compiled(double, dynamic=False)(x_BD.contiguous() if at.follows else x_BD)


@advised(Cause.DTYPE)
def cast(at: Rank) -> None:
    x_BD = ones(dtype=torch.bfloat16 if at.rank == 1 else torch.float32)
    compiled(double)(x_BD.float() if at.follows else x_BD)


@advised(Cause.REQUIRES_GRAD)
def detached(at: Rank) -> None:
    x_BD = ones(requires_grad=at.rank == 1)
    compiled(double)(x_BD.detach() if at.follows else x_BD)


@advised(Cause.FROZEN_PARAMETER)
def frozen_everywhere(at: Rank) -> None:
    model = nn.Linear(4, 4)
    if at.rank == 1 or at.follows:
        model.weight.requires_grad_(False)
    compiled(model)(ones())


@advised(Cause.TIED_WEIGHTS)
def tied_everywhere(at: Rank) -> None:
    compiled(Tied(at.rank == 0 or at.follows))(ones())


@advised(Cause.ALIAS)
def cloned(at: Rank) -> None:
    x_BD = ones()
    y_BD = x_BD if at.rank == 1 else ones()
    compiled(lambda x, y: x * y)(x_BD, y_BD.clone() if at.follows else y_BD)


@advised(Cause.DISPATCH_KEY, 0)
def made_in_one_mode(at: Rank) -> None:
    with torch.inference_mode(at.is_odd):
        w_DD = ones(4, 4) * 1
    with torch.no_grad():
        compiled(lambda x_BD: x_BD @ w_DD)(ones())


@advised(Cause.DISPATCH_KEY, 1)
def cloned_outside(at: Rank) -> None:
    with torch.inference_mode(at.rank == 1):
        w_DD = ones(4, 4) * 1
    w_DD = w_DD.clone() if at.follows else w_DD
    with torch.no_grad():
        compiled(lambda x_BD: x_BD @ w_DD)(ones())


@advised(Cause.TENSOR_SUBCLASS)
def waited(at: Rank) -> None:
    block = compiled(double)
    block(ones())
    y_BD = funcol.all_reduce(ones(), "sum", at.group) if at.rank == 1 else ones()
    block(funcol.wait_tensor(y_BD) if at.follows else y_BD)


@advised(Cause.AUTOMATIC_DYNAMIC)
def one_dynamic(at: Rank) -> None:
    compiled(double, dynamic=True if at.is_odd else None)(ones())


class Scaled(nn.Module):
    def __init__(self, scale: Any, mode: str = "sum") -> None:
        super().__init__()
        self.scale, self.mode = scale, mode

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD * self.scale if self.mode == "sum" else x_BD - self.scale


@advised(Cause.PYTHON_VALUE, 0)
def equal_value(at: Rank) -> None:
    compiled(Scaled(0.5 if at.is_odd else 0.25))(ones())


@advised(Cause.PYTHON_VALUE, 1)
def value_in_a_tensor(at: Rank) -> None:
    scale = 0.5 if at.rank == 1 else 0.25
    compiled(Scaled(torch.tensor(scale) if at.follows else scale))(ones())


@advised(Cause.PYTHON_VALUE, 2, allowed=(("guards", "scale", "of this shard"), ("graph", "mul(", "of this shard")))
def value_declared(at: Rank) -> None:
    compiled(Scaled(0.5 if at.rank == 1 else 0.25))(ones())


@advised(Cause.GUARD_ONLY, 0)
def equal_guard(at: Rank) -> None:
    bound = 16 if at.is_odd else 32

    def block(x_BD: Tensor) -> Tensor:
        return x_BD * 2 if x_BD.shape[0] < bound else x_BD

    compiled(block)(ones())


@advised(Cause.GUARD_ONLY, 1, allowed=(("guards", "bound", "of this shard"),))
def guard_declared(at: Rank) -> None:
    bound = 16 if at.rank == 1 else 32

    def block(x_BD: Tensor) -> Tensor:
        return x_BD * 2 if x_BD.shape[0] < bound else x_BD

    compiled(block)(ones())


@advised(Cause.SET_ORDER)
def set_sorted(at: Rank) -> None:
    names = {8, 0} if at.rank == 1 else {0, 8}

    def block(x_BD: Tensor) -> Tensor:
        for number in sorted(names) if at.follows else names:
            x_BD = x_BD * (number + 1)
        return x_BD

    compiled(block)(ones())


@advised(Cause.DICT_ORDER)
def dict_sorted(at: Rank) -> None:
    scales = {"b": 3.0, "a": 2.0} if at.rank == 1 else {"a": 2.0, "b": 3.0}

    def block(x_BD: Tensor, scales: dict[str, float]) -> Tensor:
        for name in sorted(scales) if at.follows else scales:
            x_BD = x_BD * scales[name]
        return x_BD

    compiled(block)(ones(), scales)


# State of the process.


@advised(Cause.AUTOCAST)
def one_autocast(at: Rank) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not at.is_odd):
        compiled(lambda x_BD: x_BD @ x_BD.t())(ones())


@advised(Cause.GRAD_MODE)
def one_grad_mode(at: Rank) -> None:
    with torch.no_grad() if at.is_odd else nullcontext():
        compiled(double)(ones())


@advised(Cause.DEFAULT_DTYPE)
def one_default_dtype(at: Rank) -> None:
    torch.set_default_dtype(torch.float64 if at.rank == 1 or at.follows else torch.float32)
    try:
        compiled(double)(ones(dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)


@advised(Cause.ALLOW_TF32)
def one_tf32(at: Rank) -> None:
    block = compiled(double)
    torch.backends.cuda.matmul.allow_tf32 = at.follows
    try:
        block(ones())
        torch.backends.cuda.matmul.allow_tf32 = at.rank == 1 or at.follows
        block(ones())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = "none"


@advised(Cause.MATMUL_PRECISION)
def one_precision(at: Rank) -> None:
    torch.set_float32_matmul_precision("medium" if at.rank == 1 or at.follows else "highest")
    try:
        compiled(double)(ones())
    finally:
        torch.set_float32_matmul_precision("highest")


@advised(Cause.NUM_THREADS)
def one_number_of_threads(at: Rank) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if at.rank == 1 or at.follows else 1)
    try:
        compiled(double)(ones())
    finally:
        torch.set_num_threads(before)


@advised(Cause.DETERMINISTIC)
def deterministic_everywhere(at: Rank) -> None:
    torch.use_deterministic_algorithms(at.rank == 1 or at.follows)
    try:
        compiled(double)(ones())
    finally:
        torch.use_deterministic_algorithms(False)


@advised(Cause.PARTITIONER)
def one_budget(at: Rank) -> None:
    def block(x_BD: Tensor, w_DD: Tensor) -> Tensor:
        return ((x_BD @ w_DD).sin() @ w_DD).sin().sum()

    with torch._functorch.config.patch(activation_memory_budget=0.0 if at.is_odd else 1.0):
        compiled(block, "aot_eager_decomp_partition")(ones(), ones(4, 4, requires_grad=True)).backward()


@advised(Cause.ENVIRONMENT, around=lambda at: torch._inductor.config.patch(max_fusion_size=32 if at.is_odd else 64))
def one_setting(at: Rank) -> None:
    compiled(double)(ones())


# Collectives.


@advised(Cause.REDUCE_OP)
def one_reduce_op(at: Rank) -> None:
    op = "max" if at.is_odd else "sum"
    compiled(lambda x_BD: funcol.wait_tensor(funcol.all_reduce(x_BD, op, at.group)))(ones())


@advised(Cause.BROADCAST_SOURCE)
def one_source(at: Rank) -> None:
    source = 1 if at.is_odd else 0
    compiled(lambda x_BD: funcol.wait_tensor(funcol.broadcast(x_BD, source, at.group)))(ones())


@advised(Cause.GROUP)
def groups_in_one_order(at: Rank) -> None:
    pairs = [dist.new_group([0, 1]) for _ in range(2)]
    group = pairs[1] if at.is_odd else pairs[0]
    compiled(lambda x_BD: funcol.wait_tensor(funcol.all_reduce(x_BD, "sum", group)))(ones())


@advised(Cause.ORDER_FORWARD)
def one_order(at: Rank) -> None:
    is_swapped, group = at.is_odd, at.group

    def block(x_BD: Tensor, y_B: Tensor) -> tuple[Tensor, ...]:
        both = [y_B, x_BD] if is_swapped else [x_BD, y_B]
        return tuple(funcol.wait_tensor(funcol.all_reduce(one, "sum", group)) for one in both)

    compiled(block)(ones(), ones(8))


@advised(Cause.ORDER_BACKWARD)
def one_order_of_the_forward(at: Rank) -> None:
    name, is_swapped = at.group.group_name, at.is_odd

    def block(x_BD: Tensor, y_BD: Tensor) -> Tensor:
        if is_swapped:
            b_BD = _SumGradient.apply(y_BD.tanh(), name, "avg")
            a_BD = _SumGradient.apply(x_BD.sin(), name, "sum")
        else:
            a_BD = _SumGradient.apply(x_BD.sin(), name, "sum")
            b_BD = _SumGradient.apply(y_BD.tanh(), name, "avg")
        return a_BD * b_BD

    x_BD, y_BD = ones(requires_grad=True), ones(requires_grad=True)
    compiled(block, "aot_eager")(x_BD, y_BD).sum().backward()


@advised(Cause.EXTRA_COLLECTIVE)
def the_same_collectives(at: Rank) -> None:
    sums_twice, group = at.is_odd, at.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = funcol.wait_tensor(funcol.all_reduce(x_BD, "sum", group))
        if sums_twice:
            y_BD = funcol.wait_tensor(funcol.all_reduce(y_BD, "sum", group))
        return y_BD

    compiled(block)(ones())


@advised(Cause.COLLECTIVE_SIZES)
def sent_padded(at: Rank) -> None:
    group = at.group

    def uneven(x_BD: Tensor) -> Tensor:
        return funcol.all_reduce(x_BD[: 8 - 2 * dist.get_rank()], "sum", group) + 1

    x_BD = ones()
    x_BD[8 - 2 * at.rank :] = 0
    compiled(summed_over(group) if at.follows else uneven)(x_BD)


@advised(Cause.UNWAITED)
def waited_for(at: Rank) -> None:
    name, waits = at.group.group_name, not at.is_odd

    def block(x_BD: Tensor) -> Tensor:
        y_BD = torch.ops._c10d_functional.all_reduce(x_BD * 2, "sum", name)
        if waits:
            y_BD = torch.ops._c10d_functional.wait_tensor(y_BD)
        return y_BD + 1

    compiled(block)(ones())


@advised(Cause.UNUSED_RESULT)
def result_used(at: Rank) -> None:
    drops, group = at.is_odd, at.group

    def block(x_BD: Tensor) -> Tensor:
        y_BD = x_BD * 2
        if drops:
            funcol.all_reduce(y_BD, "sum", group)
        else:
            y_BD = funcol.all_reduce(y_BD, "sum", group)
        return y_BD + 1

    compiled(block)(ones())


# Values that depend on the rank under equal programs.


@suggested(TaintKind.DIFFERS)
def kept_in_a_tensor(at: Rank) -> None:
    scale = 0.25 if at.rank == 0 else 0.75
    compiled(Scaled(torch.tensor(scale) if at.follows else scale))(ones())


def multiplied(scale: float, read: Callable[[], float], at: Rank) -> None:
    buffer = torch.tensor(scale)

    def block(x_BD: Tensor) -> Tensor:
        return x_BD * (buffer if at.follows else read())

    compiled(block)(ones())


@suggested(TaintKind.RANK)
def rank_in_a_buffer(at: Rank) -> None:
    multiplied(float(at.rank), dist.get_rank, at)


@suggested(TaintKind.ENVIRONMENT)
def variable_in_a_buffer(at: Rank) -> None:
    os.environ["SCALE"] = str(at.rank + 2)
    multiplied(float(os.environ["SCALE"]), lambda: float(os.environ["SCALE"]), at)
