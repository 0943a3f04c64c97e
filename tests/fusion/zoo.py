"""Programs of all kinds that Inductor treats differently, small enough for a compile in a second or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Program:
    """A function, its inputs, and how it is compiled."""

    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    options: dict[str, Any] = field(default_factory=dict)
    """Of Inductor."""
    is_trained: bool = False
    more_inputs: Callable[[], tuple[Any, ...]] = tuple
    dynamic: bool | None = None
    num_graphs: int = 1

    def step(self, device: str = "cpu") -> Callable[[], None]:
        """Its inputs are made; each call runs the compiled program once, the first compiles it."""
        torch.manual_seed(0)
        inputs = [torch.randn(shape, device=device, requires_grad=self.is_trained) for shape in self.shapes]
        more = [one.to(device) for one in self.more_inputs()]
        compiled = torch.compile(self.function, options=self.options or None, dynamic=self.dynamic)
        ones: list[Tensor] = []

        def run() -> None:
            out = compiled(*inputs, *more)
            if self.is_trained:
                ones.append(ones[0] if ones else torch.ones_like(out))
                torch.autograd.grad(out, inputs, ones[0])

        return run


@torch.library.custom_op("tpcompile_zoo::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tpcompile_zoo::add_to", mutates_args=("x",))
def add_to(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def _in_place(x: Tensor) -> Tensor:
    x.add_(1).mul_(2)
    return x.relu()


def _broken(x: Tensor) -> Tensor:
    y = x.sin() + 1
    torch._dynamo.graph_break()
    return y.cos() * 2


def _printing(x: Tensor) -> Tensor:
    y = x.sin()
    torch._higher_order_ops.print("{total}", total=y.sum())
    return y.cos()


def _mutating_op(x: Tensor, y: Tensor) -> Tensor:
    z = x.sin()
    add_to(z, y)
    return z.cos()


def _rms_ffn(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = F.rms_norm(x, (x.shape[-1],))
    return x + (F.silu(y @ gate) * (y @ up)) @ down


def _experts(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Tokens to their expert, and back."""
    order = expert.argsort()
    out = torch.zeros_like(x).index_add_(0, order, (x[order] @ weight).relu())
    counts = x.new_zeros(4).scatter_add(0, expert, x.new_ones(len(x)))
    return out + counts[0]


def _all_reduce(x: Tensor, weight: Tensor) -> Tensor:
    y = funcol.all_reduce(x @ weight, "sum", dist.group.WORLD)
    return F.rms_norm(y + x, (x.shape[-1],))


def _all_gather(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor(x.sin(), 0, dist.group.WORLD).cos()


def _reduce_scatter(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor(x.sin(), "sum", 0, dist.group.WORLD).cos()


def _all_to_all(x: Tensor) -> Tensor:
    return funcol.all_to_all_single(x.sin(), None, None, dist.group.WORLD).cos()


def _two_all_reduces(x: Tensor) -> Tensor:
    first = funcol.all_reduce(x.sin(), "sum", dist.group.WORLD)
    second = funcol.all_reduce(x.cos(), "max", dist.group.WORLD)
    return first * 2 + second


def _indices() -> tuple[Tensor]:
    return (torch.arange(8) % 5,)


def _of_experts() -> tuple[Tensor]:
    return (torch.tensor([0, 1, 2, 3, 3, 2, 1, 0]),)


class Grouped:
    """A scheduler pass that groups all nodes: Inductor fuses within a group after all other passes."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        from torch._inductor.scheduler import GroupedSchedulerNode

        return [GroupedSchedulerNode.create(nodes)]

    def uuid(self) -> None:
        """Nothing that it makes is cached."""


SQUARE = (8, 16)
ZOO = {
    "pointwise": Program(lambda x, y, z: torch.sigmoid(x * y + z), (SQUARE,) * 3),
    "horizontal": Program(lambda x: (x.sin(), x.cos()), (SQUARE,)),
    "softmax": Program(lambda x: F.softmax(x, -1), (SQUARE,)),
    "layer norm": Program(lambda x: F.layer_norm(x, (16,)).mul(2), (SQUARE,), is_trained=True),
    "mixed order of reductions": Program(lambda x, w: ((x * w).sum(-1), (x * w).sum(0)), (SQUARE, (16,))),
    "sum of all": Program(lambda x: x.exp().sum(), ((64, 64),)),
    "variance": Program(lambda x: (x - x.mean(-1, keepdim=True)).pow(2).sum(0), (SQUARE,)),
    "cumulative sum": Program(lambda x: torch.cumsum(x, -1) + 1, (SQUARE,)),
    "sort": Program(lambda x: torch.sort(x + 1, -1)[0] * 2, (SQUARE,)),
    "foreach": Program(lambda a, b, c, d: torch._foreach_add([a, b], [c, d]), (SQUARE, (4, 4)) * 2),
    "matmul and activation": Program(lambda x, w: torch.relu(x @ w), (SQUARE, (16, 16))),
    "linear": Program(lambda x, w, b: F.gelu(F.linear(x, w, b)), (SQUARE, (16, 16), (16,)), is_trained=True),
    "batched matmul": Program(lambda a, b: torch.bmm(a, b) + 1, ((2, 8, 8),) * 2),
    "feed-forward": Program(_rms_ffn, (SQUARE, (16, 32), (16, 32), (32, 16)), is_trained=True),
    "convolution": Program(lambda x, w: torch.relu(F.conv2d(x, w)), ((1, 4, 8, 8), (4, 4, 3, 3))),
    "pooling": Program(lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2), ((1, 4, 8, 8),)),
    "embedding": Program(lambda w, i: F.embedding(i, w) + 1, ((10, 16),), is_trained=True, more_inputs=_indices),
    "dropout": Program(lambda x: F.dropout(x, 0.5) + 1, (SQUARE,), is_trained=True),
    "attention": Program(lambda q, k, v: F.scaled_dot_product_attention(q, k, v) + 1, ((1, 2, 8, 16),) * 3),
    "experts": Program(_experts, (SQUARE, (16, 16)), more_inputs=_of_experts),
    "in place": Program(_in_place, (SQUARE,)),
    "alias in place": Program(lambda x: (x.view(-1).add_(1), x.sum(-1)), (SQUARE,)),
    "cast": Program(lambda x: (x.bfloat16() * 2).float().sum(-1), (SQUARE,)),
    "concatenation": Program(lambda x, y: torch.cat([x.sin(), y.cos()], -1) * 2, (SQUARE,) * 2),
    "split": Program(lambda x: [part.relu() for part in x.split(8, -1)], (SQUARE,)),
    "graph break": Program(_broken, (SQUARE,), num_graphs=2),
    "dynamic shapes": Program(lambda x, w: F.softmax(x @ w, -1), (SQUARE, (16, 16)), dynamic=True),
    "custom op": Program(lambda x: doubled(x.sin()).cos(), (SQUARE,)),
    "custom op in place": Program(_mutating_op, (SQUARE,) * 2),
    "combined kernels": Program(lambda x, y: (x.sin(), y.cos()), (SQUARE, (4, 4)), {"combo_kernels": True}),
    "print": Program(_printing, (SQUARE,)),
    "grouped": Program(lambda x: F.softmax(x, -1), (SQUARE,), {"_pre_fusion_custom_pass": Grouped()}),
    "no fusion": Program(lambda x: x.sin().sum(-1) + 1, (SQUARE,), {"max_fusion_size": 1}),
    "tuned matmul": Program(
        lambda x, w: torch.relu(x @ w),
        ((32, 32),) * 2,
        {"max_autotune": True, "max_autotune_gemm_backends": "CPP,ATEN"},
    ),
}
LARGE = (2048, 2048)
TRITON = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON", "test_configs.max_mm_configs": 1}
ON_GPU = {
    "long cumulative sum": Program(lambda x: torch.cumsum(x, 0), ((1 << 20,),)),
    "long sum": Program(lambda x: x.exp().sum(), (LARGE,)),
    "cooperative sum": Program(lambda x: x.sum(), (LARGE,), {"triton.cooperative_reductions": True}),
    "looped softmax": Program(lambda x: F.softmax(x, -1), ((8, 8192),)),
    "long mixed order": Program(lambda x, w: ((x * w).sum(-1), (x * w).sum(0)), ((32768, 1024), (1024,))),
    "template": Program(lambda x, w: torch.relu(x @ w), (LARGE,) * 2, TRITON),
    "template with an operand": Program(lambda x, w: torch.relu(x + 1) @ w, (LARGE,) * 2, TRITON),
    "sum behind a template": Program(lambda x, w: (x @ w).sum(-1), (LARGE,) * 2, TRITON),
}
"""What only the Triton backend makes."""
COLLECTIVES = {
    "all_reduce": Program(_all_reduce, (SQUARE, (16, 16))),
    "all_gather": Program(_all_gather, (SQUARE,)),
    "reduce_scatter": Program(_reduce_scatter, (SQUARE,)),
    "all_to_all": Program(_all_to_all, (SQUARE,)),
    "two all_reduces": Program(_two_all_reduces, (SQUARE,)),
    "reordered for overlap": Program(_two_all_reduces, (SQUARE,), {"reorder_for_compute_comm_overlap": True}),
}
"""Of one rank: what Inductor generates does not depend on the size of the group."""
