"""Our transformer blocks and language model, as a user compiles them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.block_forms import form_config
from tests.faults.healthy.program import Run, program, sgd
from tpcompile.collectives.strategies import Collectives
from tpcompile.config import BlockConfig
from tpcompile.nn.block import TransformerStack
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.rope import rope_tables
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_inputs, draw_stack_weights, draw_weights

_SMALL = {"dim": 64, "num_heads": 8, "ffn_dim": 128, "num_layers": 1}
_VOCABULARY = 96


def _config(run: Run, form: str, **changes: Any) -> BlockConfig:
    config = form_config(form, "cpu")
    small = _SMALL | {"batch": run.draw.batch, "seq_len": run.draw.tokens}
    return BlockConfig.model_validate(config.model_dump() | small | changes)


def _stack(run: Run, form: str, **changes: Any) -> tuple[BlockConfig, TransformerStack]:
    config = _config(run, form, **changes)
    full = draw_stack_weights(config, seed=run.draw.seed, dtype=torch.float32, device=run.device)
    with torch.device("meta"):
        stack = TransformerStack(config, Collectives(run.group), num_layers=config.num_layers)
    stack = stack.to_empty(device=run.device)
    load_full_state_dict(stack, full)
    return config, stack


def _inputs(run: Run, config: BlockConfig, step: int) -> Any:
    return draw_inputs(
        config, seed=run.draw.seed + step, device=run.device, dtype=torch.float32, seq_len=config.seq_len
    )


def _run_stack(run: Run, form: str, **changes: Any) -> None:
    config, stack = _stack(run, form, **changes)
    compiled, optimizer = run.compile(stack), sgd(stack)
    for step in run.steps():
        run.advance(compiled, optimizer, *_inputs(run, config, step))


@program(sizes=(2, 4))
def stack_wan(run: Run) -> None:
    """A stack in the Wan form."""
    _run_stack(run, "wan")


@program()
def stack_wan_2_1(run: Run) -> None:
    """A stack with modulation and cross-attention."""
    _run_stack(run, "wan 2.1", context_len=6)


@program()
def stack_llama(run: Run) -> None:
    """A stack in the Llama form, two layers."""
    _run_stack(run, "llama", num_layers=2)


@program(sizes=(2, 4))
def stack_gqa_replicated(run: Run) -> None:
    """Grouped queries with fewer key and value heads than ranks."""
    _run_stack(run, "kv replicated")


@program(sizes=(2, 4))
def stack_sequence_parallel(run: Run) -> None:
    """The sequence-parallel form."""
    _run_stack(run, "sp llama")


@program(backends=("aot_eager",))
def stack_everything(run: Run) -> None:
    """All options of the block, dropout among them."""
    _run_stack(run, "everything", context_len=6)


@program(sizes=(4,), dp=2)
def stack_2d_mesh(run: Run) -> None:
    """Tensor-parallel groups of a 2-D mesh, each with its own data."""
    _run_stack(run, "wan no norm")


@program()
def layers_compiled(run: Run) -> None:
    """Every layer compiled in place: one graph that all layers share."""
    config, stack = _stack(run, "llama", num_layers=3)
    for layer in stack.layers:
        layer.compile(backend=run.draw.backend)
    optimizer = sgd(stack)
    for step in run.steps():
        run.advance(stack, optimizer, *_inputs(run, config, step))


@program(trains=(True,))
def layers_checkpointed(run: Run) -> None:
    """Activation checkpointing around every layer, within one compiled module."""
    config, stack = _stack(run, "wan", num_layers=2)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = stack.layers

        def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
            for layer in self.layers:
                x_BSD = checkpoint(layer, x_BSD, cos_SR, sin_SR, use_reentrant=False)
            return x_BSD

    compiled, optimizer = run.compile(Checkpointed()), sgd(stack)
    for step in run.steps():
        run.advance(compiled, optimizer, *_inputs(run, config, step)[:3])


def _language_model(run: Run) -> CausalLM:
    config = _config(run, "qwen 3", head_size=8)
    with torch.device("meta"):
        twin = CausalLM(config, Collectives(None), num_layers=config.num_layers, vocab_size=_VOCABULARY)
        model = CausalLM(config, Collectives(run.group), num_layers=config.num_layers, vocab_size=_VOCABULARY)
    full = draw_weights(twin, seed=run.draw.seed, dtype=torch.float32, device=run.device)
    model = model.to_empty(device=run.device)
    load_full_state_dict(model, full)
    return model


@program(trains=(True,))
def language_model_training(run: Run) -> None:
    """Loss of a sharded language model, AdamW, gradients of two batches accumulated."""
    model = _language_model(run)
    tables = rope_tables(model.head_dim, run.draw.tokens, device=run.device, dtype=torch.float32)
    loss, optimizer = run.compile(model.loss), torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in run.steps():
        ids = run.ids(step, run.draw.batch, run.draw.tokens + 1, vocabulary=_VOCABULARY)
        (loss(ids[:, :-1], ids[:, 1:], *tables) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@program(trains=(False,))
def language_model_decoding(run: Run) -> None:
    """Prompts, then tokens one by one with a key-value cache: two graphs."""
    model = _language_model(run)
    model.compile(backend=run.draw.backend)
    total = run.draw.tokens + 4
    tables = rope_tables(model.head_dim, total, device=run.device, dtype=torch.float32)
    caches = model.new_caches(run.draw.batch, total)
    for step in run.steps():
        ids = run.ids(step, run.draw.batch, run.draw.tokens, vocabulary=_VOCABULARY)
        model.generate(ids, *tables, num_new_tokens=4, caches=caches)
