"""Models sharded by a plan: `parallelize_module`, transformers' `tp_plan`, FSDP2 and DDP over a second axis."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tpcompile.target import Target, TargetContext

WIDTH, VOCABULARY = 64, 128


class Attention(nn.Module):
    """Causal; heads are counted from the width that a rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        q, k, v = (w(x_BSD).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y_BhSE = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y_BhSE.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and MLP, each after a norm, around the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, D] -> [B, S, D]."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD))
        return x_BSD + self.mlp(self.norm(x_BSD))


class Model(nn.Module):
    """Embedding, blocks, norm and head, written for one device."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """[B, S] -> logits [B, S, V]."""
        x_BSD = self.embedding(ids_BS)
        for block in self.blocks:
            x_BSD = block(x_BSD)
        return self.head(self.norm(x_BSD))


_OF_A_BLOCK = {
    "attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel(),
    "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(),
}  # fmt: skip


def _ids(ctx: TargetContext, length: int = 32) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), device=ctx.device)


def tensor_parallel(ctx: TargetContext) -> Target:
    """Column and row parallel; a second length."""
    model = Model().to(ctx.device)
    for block in model.blocks:
        parallelize_module(block, ctx.mesh["tp"], _OF_A_BLOCK)
    return Target(program=model, inputs=(_ids(ctx),))


def sequence_parallel(ctx: TargetContext) -> Target:
    """Activations between the linears are sharded over tokens; the loss over the vocabulary; trained."""
    model = Model().to(ctx.device)
    tp = ctx.mesh["tp"]
    outer = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    inner = {
        "attention_norm": SequenceParallel(), "norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.w[qkv]": ColwiseParallel(), "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    parallelize_module(model, tp, outer)
    for block in model.blocks:
        parallelize_module(block, tp, inner)

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        with loss_parallel():
            logits = program(*inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), inputs[0].flatten())
            loss.backward()
        return loss

    return Target(program=model, inputs=(_ids(ctx),), step=step)


def fully_sharded(ctx: TargetContext) -> Target:
    """FSDP2 over `dp`, a plan over `tp`; blocks compiled one by one; trained."""
    model = Model().to(ctx.device)
    for block in model.blocks:
        parallelize_module(block, ctx.mesh["tp"], _OF_A_BLOCK)
        if "dp" in ctx.mesh.mesh_dim_names:
            fully_shard(block, mesh=ctx.mesh["dp"])
        block.compile()
    if "dp" in ctx.mesh.mesh_dim_names:
        fully_shard(model, mesh=ctx.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss = program(*inputs).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        return loss

    return Target(program=model, inputs=(_ids(ctx),), step=step, is_compiled=True, num_graphs=None)


def data_parallel(ctx: TargetContext) -> Target:
    """DDP over `dp`, shards cut by hand over `tp`; compiled as a whole; trained."""
    from tests.dryrun.healthy.by_hand import Network

    model: nn.Module = Network(ctx.mesh["tp"].get_group()).to(ctx.device)
    if "dp" in ctx.mesh.mesh_dim_names:
        model = DistributedDataParallel(model, process_group=ctx.mesh["dp"].get_group())

    def step(program: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        loss = program(*inputs).square().mean()
        loss.backward()
        return loss

    return Target(program=model, inputs=(torch.randn(4, 16, WIDTH, device=ctx.device),), step=step, num_graphs=None)


def uneven(ctx: TargetContext) -> Target:
    """A width that the ranks do not divide: the last ones have fewer rows."""
    linear = nn.Linear(WIDTH, 4 * WIDTH + 3).to(ctx.device)
    parallelize_module(linear, ctx.mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    return Target(program=linear, inputs=(torch.randn(4, WIDTH, device=ctx.device),))


def dtensors(ctx: TargetContext) -> Target:
    """DTensors as arguments, redistributed in the program."""
    tp = ctx.mesh["tp"]
    x = distribute_tensor(torch.randn(64, WIDTH, device=ctx.device), tp, [Shard(0)])
    weight = distribute_tensor(torch.randn(WIDTH, WIDTH, device=ctx.device), tp, [Replicate()])

    def program(x: DTensor, weight: DTensor) -> Tensor:
        y = (x @ weight).redistribute(tp, [Replicate()])
        return y.to_local().sum(0)

    return Target(program=program, inputs=(x, weight))


def transformers_plan(ctx: TargetContext) -> Target:
    """Settings: family, Llama, Qwen3 or Mixtral."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    family = ctx.settings.get("family", "Llama")
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2} if family == "Mixtral" else {}
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        head_dim=8, vocab_size=VOCABULARY, max_position_embeddings=64, **experts,
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    tp_size = ctx.mesh["tp"].size()
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=tp_size))
    model = model.maybe_distribute_model(model, settings, mesh)
    ids = _ids(ctx, 12)
    names = ("transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward")
    return Target(
        program=model, inputs={"input_ids": ids, "labels": ids, "use_cache": False}, tp_aware=names, num_graphs=None
    )
