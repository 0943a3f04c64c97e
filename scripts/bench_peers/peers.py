"""The context of a program -> the plain module, parallelised as users of other libraries do it.

    tpcompile bench --program scripts/bench_peers/peers.py:dtensor

dtensor       `parallelize_module`: column- and row-parallel linears, activations between them replicated
dtensor_sp    the sequence-parallel plan: norms on shards of the tokens
async_tp      that plan with Inductor's `_micro_pipeline_tp`, which overlaps matrix products with their collectives
hooks         slices of the weights, and an all-reduce in a forward hook of each row-parallel linear, as in gpt-fast

Full-dim norms of q and k: under DTensor they run on DTensors that are sharded over the width, whose mean DTensor sums
over the ranks, q and k apart; under hooks the mean is averaged, q and k apart as well.
"""

from __future__ import annotations

from functools import partial

import torch
import torch._inductor.config
from plain import Attention, Stack, check_plain, plain_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tpcompile.bench.contract import BenchContext, Program
from tpcompile.collectives import api as collectives
from tpcompile.errors import ConfigError
from tpcompile.torch_api import symmetric

Plan = dict[str, ParallelStyle]


def _check(context: BenchContext, *, sequence_parallel: bool = False) -> None:
    """Raises ConfigError for a block that the plain module is not, and for sizes that the ranks do not divide."""
    check_plain(context.config.block, context.world_size)
    num_tokens = context.config.block.seq_len
    if sequence_parallel and num_tokens % context.world_size:
        raise ConfigError(f"tp={context.world_size} does not divide {num_tokens} tokens")


class ShardedNorm(ParallelStyle):
    """A norm over a dim that is sharded: DTensor in, this rank's shard out, the weight sharded alike."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _shard_weight, output_fn=lambda _, y, mesh: y.to_local())


def _shard_weight(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for own, parameter in list(module.named_parameters(recurse=False)):
        sharded = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter(own, nn.Parameter(sharded))


def dtensor(context: BenchContext, *, sequence_parallel: bool = False) -> Program:
    """The stack parallelised by `parallelize_module`. Raises ConfigError for a block that it is not."""
    mesh, block = context.mesh, context.config.block
    _check(context, sequence_parallel=sequence_parallel)
    stack = _plain_stack(context)
    for layer in stack.layers:
        plan = _block_plan(block.qk_norm, is_gated=block.style == "llama", sequence_parallel=sequence_parallel)
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    if sequence_parallel:
        tokens, whole = (Shard(1), None, None), (Replicate(), None, None)
        # On layers, not on the stack: hooks of the module that is compiled are regions of their own.
        enters = PrepareModuleInput(input_layouts=whole, desired_input_layouts=tokens, use_local_output=True)
        parallelize_module(stack.layers[0], mesh, enters)
        leaves = PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
        parallelize_module(stack.layers[-1], mesh, leaves)
    return Program(
        program=stack,
        inputs=context.inputs[:3],
        renamed=partial(plain_state, config=block),
        slice_of=lambda name, full: full,  # gradients are DTensors, compared whole
    )


def dtensor_sp(context: BenchContext) -> Program:
    """The stack parallelised by the sequence-parallel plan. Raises ConfigError as `dtensor`."""
    return dtensor(context, sequence_parallel=True)


def _block_plan(qk_norm: str, *, is_gated: bool, sequence_parallel: bool) -> Plan:
    """The plan of one block; attention and MLP make their input a DTensor once, so that its gradient is summed once."""
    outer = Shard(1) if sequence_parallel else Replicate()
    is_sharded = qk_norm == "full"
    plan: Plan = {
        "attention": PrepareModuleInput(
            input_layouts=(outer, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(use_local_output=not is_sharded),
        "attention.wk": ColwiseParallel(use_local_output=not is_sharded),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=outer),
        "mlp": PrepareModuleInput(input_layouts=(outer,), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=outer),
    }
    if is_gated:
        plan["mlp.gate"] = ColwiseParallel()
    if sequence_parallel:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
    if is_sharded:
        plan |= {"attention.q_norm": ShardedNorm(), "attention.k_norm": ShardedNorm()}
    elif qk_norm == "per_head":
        heads = partial(SequenceParallel, sequence_dim=2, use_local_output=True)
        plan |= {"attention.q_norm": heads(), "attention.k_norm": heads()}
    return plan


def async_tp(context: BenchContext) -> Program:
    """The sequence-parallel plan; Inductor splits its products and moves pieces through symmetric memory.

    Raises ConfigError without Inductor and GPUs, and where torch would gather small shards by NVLink multicast.
    """
    if context.device.type != "cuda" or context.config.compile.backend != "inductor":
        raise ConfigError("needs GPUs and Inductor")
    if symmetric.has_multicast(context.device):
        raise ConfigError("it would use NVLink multicast; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1")
    symmetric.enable(context.group)
    torch._inductor.config._micro_pipeline_tp = True  # this process has no other program
    return dtensor_sp(context)


def hooks(context: BenchContext) -> Program:
    """Slices and hooks; q, k and v are one linear, as in gpt-fast. Raises ConfigError for training."""
    _check(context)
    if context.config.train:
        raise ConfigError("these hooks are for inference: the gradient of their all-reduce is not that of the sum")
    stack = _plain_stack(context, packed=True)
    place = context.rank, context.world_size
    reduce = partial(collectives.all_reduce, group=context.group)
    for layer in stack.layers:
        attention, mlp = layer.attention, layer.mlp
        _slice_rows(attention.wqkv, attention.widths, *place)
        attention.widths = tuple(width // place[1] for width in attention.widths)
        for linear in filter(None, (mlp.gate, mlp.up)):
            _slice_rows(linear, (linear.out_features,), *place)
        for linear in (attention.wo, mlp.down):
            _slice_columns(linear, *place)
            linear.register_forward_hook(lambda _, args, y: reduce(y))
        _hook_norms(attention, context)
    return Program(program=stack, inputs=context.inputs[:3])


def _hook_norms(attention: Attention, context: BenchContext) -> None:
    """Full-dim norms: each rank's mean of squares becomes the mean of all of them."""
    rank, size = context.rank, context.world_size
    if attention.q_norm is None or attention.k_norm is None or attention.norms_heads:
        return
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight = nn.Parameter(norm.weight.detach().chunk(size)[rank].clone())
        norm.mean_square.register_forward_hook(
            lambda _, args, mean: collectives.all_reduce(mean, group=context.group) / size
        )


def _slice_rows(linear: nn.Linear, widths: tuple[int, ...], rank: int, size: int) -> None:
    """This rank's rows of every packed part."""
    for name, parameter in list(linear.named_parameters()):
        parts = [part.chunk(size)[rank] for part in parameter.detach().split(list(widths))]
        setattr(linear, name, nn.Parameter(torch.cat(parts)))


def _slice_columns(linear: nn.Linear, rank: int, size: int) -> None:
    """This rank's columns; the bias is added before the sum, so it counts on rank 0 only."""
    linear.weight = nn.Parameter(linear.weight.detach().chunk(size, 1)[rank].clone())
    if linear.bias is not None and rank:
        linear.bias = nn.Parameter(torch.zeros_like(linear.bias))


def _plain_stack(context: BenchContext, *, packed: bool = False) -> Stack:
    """Unsharded, with the numbers of the full state dict, which is on the device one tensor at a time."""
    block = context.config.block
    with torch.device("meta"):
        stack = Stack(block, packed=packed).to(context.dtype)
    stack = stack.to_empty(device=context.device)
    parameters = dict(stack.named_parameters())
    with torch.no_grad():
        for name, full in context.weights.items():
            for own, part in plain_state({name: full}, block, packed=packed).items():
                parameters.pop(own).copy_(part)
    assert not parameters, f"without a value: {sorted(parameters)}"
    return stack
