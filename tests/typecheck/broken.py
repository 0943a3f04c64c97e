"""Small tensor-parallel programs that are not well-typed, one fault each.

The line that breaks it ends in `# here`; the check must name that very line.
"""

# B batch, S sequence, D model width, F hidden width, V vocabulary, H heads; lower case is this rank's share
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tests.typecheck.programs import (
    BIAS,
    COLUMN,
    LOCAL,
    PLAIN,
    SEQUENCE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Layout,
    mean_square,
)
from tpcompile.collectives import api as collectives


def bias_before_reduce(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    return m.comm.all_reduce(F.linear(h, m.down, m.bias))  # here


def missing_reduce(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    y = F.linear(h, m.down)
    return m.comm.all_reduce(F.gelu(y))  # here


def partial_returned(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    return F.linear(h, m.down)  # here


def dropped_result(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    m.comm.all_reduce(y)  # here
    return y


def dropped_functional_result(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    funcol.all_reduce(y, "sum", m.comm.group)  # here
    return m.comm.all_reduce(y)


def double_reduce(m: Any, x: Tensor) -> Tensor:
    y = m.comm.all_reduce(F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down))
    return m.comm.all_reduce(y)  # here


def missing_copy(m: Any, x: Tensor) -> Tensor:
    h = F.linear(x, m.up)  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def double_copy(m: Any, x: Tensor) -> Tensor:
    x = m.comm.copy_to_tp(x)
    h = F.linear(m.comm.copy_to_tp(x), m.up)  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def norm_with_replicated_gradient(m: Any, x: Tensor) -> Tensor:
    """Known TP bug 3."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    total = m.comm.all_reduce(h.square().sum(-1, keepdim=True), dst="I")
    h = h * torch.rsqrt(total / WIDTH + 1e-6)  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def shard_local_norm(m: Any, x: Tensor) -> Tensor:
    """Known TP bug 4."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = h * torch.rsqrt(mean_square(h) + 1e-6)  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def fused_shard_local_norm(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    h = F.layer_norm(h, (LOCAL,))  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def shard_local_sum(m: Any, x: Tensor) -> Tensor:
    """The sum of a norm, never reduced, over the global width (HiDream)."""
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    total = h.square().sum(-1, keepdim=True)
    h = h * torch.rsqrt(total / WIDTH + 1e-6)  # here
    return m.comm.all_reduce(F.linear(h, m.down))


def local_softmax(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    return m.comm.all_gather(logits.softmax(-1), dim=-1, dst="I")  # here


def local_loss(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up).flatten(0, 1)
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long, device=x.device))  # here


def local_maximum(m: Any, x: Tensor) -> Tensor:
    logits = F.linear(m.comm.copy_to_tp(x), m.up)
    total = (logits - logits.detach().amax(-1, keepdim=True)).exp().sum(-1)  # here
    return m.comm.all_reduce(total)


def functional_row(m: Any, x: Tensor) -> Tensor:
    """torch's all-reduce has an all-reduce as its backward."""
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    y = funcol.all_reduce(F.linear(h, m.down), "sum", m.comm.group)
    return y + m.bias  # here


def functional_row_returned(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    return funcol.all_reduce(F.linear(h, m.down), "sum", m.comm.group)  # here


def row_with_summed_gradient(m: Any, x: Tensor) -> Tensor:
    h = F.gelu(F.linear(m.comm.copy_to_tp(x), m.up))
    y = m.comm.all_reduce(F.linear(h, m.down), dst="R")
    return x + y  # here


def in_place_reduce(m: Any, x: Tensor) -> Tensor:
    """Known TP bug 1."""
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    dist.all_reduce(y, group=m.comm.group)  # here
    return y


def head_norm_without_copy(m: Any, x: Tensor) -> Tensor:
    """Known TP bug 12: every rank applies the weight to other heads."""
    q = F.linear(m.comm.copy_to_tp(x), m.up).unflatten(-1, (2, 4))
    q = q * torch.rsqrt(mean_square(q) + 1e-6)
    q = q * m.norm  # here
    return m.comm.all_reduce(F.linear(q.flatten(-2), m.down))


def sequence_norm_without_copy(m: Any, x_sBD: Tensor) -> Tensor:
    """Known TP bug 12: every rank applies the weight to other tokens."""
    h = F.rms_norm(x_sBD, (WIDTH,)) * m.norm  # here
    h = F.silu(F.linear(m.comm.all_gather(h, dim=0, dst="R"), m.up))
    return x_sBD + m.comm.reduce_scatter(F.linear(h, m.down), dim=0)


def scale_before_reduce(m: Any, x: Tensor) -> Tensor:
    """Right forward; the gradient of the scale is partial."""
    y = F.linear(F.gelu(F.linear(m.comm.copy_to_tp(x), m.up)), m.down)
    return m.comm.all_reduce(y * m.bias)  # here


def wrong_op(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    return collectives.all_reduce(y, group=m.comm.group, op="max")  # here


def wrong_source(m: Any, x: Tensor) -> Tensor:
    return m.comm.all_gather(m.comm.scatter(x, dim=-1, src="R"), dim=-1, dst="I")  # here


def shard_returned(m: Any, x: Tensor) -> Tensor:
    return F.linear(m.comm.copy_to_tp(x), m.up)


def summed_gather(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    return m.comm.all_gather(h, dim=-1, dst="R")  # here


def partial_product(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    return m.comm.all_reduce(y * y)  # here


def shard_plus_partial(m: Any, x: Tensor) -> Tensor:
    h = F.linear(m.comm.copy_to_tp(x), m.up)
    return m.comm.all_reduce(h + F.linear(h, m.middle))  # here


def embedding_without_reduce(m: Any, x: Tensor) -> Tensor:
    ids = torch.zeros(TOKENS, dtype=torch.long, device=x.device)
    rows = torch.where(ids.unsqueeze(-1) == m.comm.rank_index(x.device), F.embedding(ids, m.table), 0.0)
    logits = F.linear(m.comm.copy_to_tp(rows), m.up)  # here
    return m.comm.all_gather(logits, dim=-1, dst="I")


def embedding_returned_without_reduce(m: Any, x: Tensor) -> Tensor:
    ids = torch.zeros(TOKENS, dtype=torch.long, device=x.device)
    return torch.where(ids.unsqueeze(-1) == m.comm.rank_index(x.device), F.embedding(ids, m.table), 0.0)


def decided_on_partial(m: Any, x: Tensor) -> Tensor:
    y = F.linear(F.linear(m.comm.copy_to_tp(x), m.up), m.down)
    best = y.argmax(-1)  # here
    return m.comm.all_reduce(y) + best.unsqueeze(-1)


@dataclass(frozen=True)
class Fault:
    """A program and what the check must say first."""

    rule: str
    op: str
    forward: Callable[..., Any]
    layouts: dict[str, Layout]
    input_type: str = "I"
    output_type: str = "I"


FAULTS = (
    Fault("bias-before-reduce", "aten.addmm", bias_before_reduce, PLAIN | {"bias": BIAS}),
    Fault("partial-used-as-whole", "aten.gelu", missing_reduce, PLAIN),
    Fault("partial-used-as-whole", "output of aten.mm", partial_returned, PLAIN),
    Fault("result-dropped", "all_reduce", dropped_result, PLAIN),
    Fault("result-dropped", "_c10d_functional.all_reduce", dropped_functional_result, PLAIN),
    Fault("double-reduce", "all_reduce", double_reduce, PLAIN),
    Fault("missing-copy", "aten.mm", missing_copy, PLAIN),
    Fault("double-copy", "copy_to_tp", double_copy, PLAIN),
    Fault("needs-dst-R", "aten.mul", norm_with_replicated_gradient, PLAIN),
    Fault("local-statistic", "aten.rsqrt", shard_local_norm, PLAIN),
    Fault("local-statistic", "aten.native_layer_norm", fused_shard_local_norm, PLAIN),
    Fault("partial-used-as-whole", "aten.add", shard_local_sum, PLAIN),
    Fault("local-statistic", "aten._softmax", local_softmax, PLAIN),
    Fault("local-statistic", "aten._log_softmax", local_loss, PLAIN),
    Fault("local-statistic", "aten.sub", local_maximum, PLAIN),
    Fault("needs-dst-I", "aten.add", functional_row, PLAIN | {"bias": BIAS}),
    Fault("needs-dst-I", "output of _c10d_functional.all_reduce", functional_row_returned, PLAIN),
    Fault("needs-dst-I", "aten.add", row_with_summed_gradient, PLAIN),
    Fault("no-stated-gradient", "c10d.allreduce", in_place_reduce, PLAIN),
    Fault("missing-copy", "aten.mul", head_norm_without_copy, PLAIN | {"norm": ((4,), None)}),
    Fault("missing-copy", "aten.mul", sequence_norm_without_copy, SEQUENCE, "V(0)", "V(0)"),
    Fault("missing-copy", "aten.mul", scale_before_reduce, PLAIN | {"bias": BIAS}),
    Fault("wrong-reduce-op", "all_reduce", wrong_op, PLAIN),
    Fault("wrong-src", "scatter_single", wrong_source, {}),
    Fault("sharded-output", "output", shard_returned, {"up": COLUMN}),
    Fault("needs-dst-I", "output of all_gather(dst='R')", summed_gather, {"up": COLUMN}),
    Fault("partial-used-as-whole", "aten.mul", partial_product, PLAIN),
    Fault("partial-used-as-whole", "aten.add", shard_plus_partial, PLAIN | {"middle": ((LOCAL, LOCAL), 1)}),
    Fault("double-copy", "copy_to_tp", embedding_without_reduce, PLAIN | VOCABULARY),
    Fault("sharded-output", "output", embedding_returned_without_reduce, VOCABULARY),
    Fault("partial-used-as-whole", "aten.argmax", decided_on_partial, PLAIN),
)
