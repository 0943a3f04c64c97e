"""Greedy decoding of a Llama-8B of 4 layers with drawn weights: FILE.json, under torchrun.

In float32 the tokens of replays are compared with those of the eager model; in bfloat16, where roundings that fusion
moves can decide between two tokens, with those of the compiled step, which is also what they are timed against.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile import config, profiles
from tpcompile.collectives.strategies import Collectives
from tpcompile.fastpath import tp_region
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.rope import rope_tables
from tpcompile.nn.state import load_full_state_dict
from tpcompile.numerics.draw import draw_weights

LAYERS, VOCABULARY, BATCH, PROMPT, NEW = 4, 128256, 1, 32, 96
ROUNDS = 5
MUST_BE = {"float32": ("graphed_is_eager", "graphed_is_default"), "bfloat16": ("graphed_is_default",)}


def model_of(dtype: str, device: torch.device) -> CausalLM:
    block = config.load("llama8b", [f"block.dtype={dtype}"]).block
    sizes = {"num_layers": LAYERS, "vocab_size": VOCABULARY}
    with torch.device("meta"):
        model = CausalLM(block, Collectives(dist.group.WORLD), **sizes)
        whole = CausalLM(block, Collectives(None), **sizes)
    model.to_empty(device=device)
    full = draw_weights(whole, seed=0, dtype=getattr(torch, dtype), device=device)
    load_full_state_dict(model, full)
    return model.requires_grad_(False)


class Decoder:
    """One model, its prompt and its caches."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.model = model_of(dtype, device)
        generator = torch.Generator(device).manual_seed(1)
        self.prompt = torch.randint(VOCABULARY, (BATCH, PROMPT), generator=generator, device=device)
        self.tables = rope_tables(self.model.head_dim, PROMPT + NEW, device=device, dtype=torch.float32)
        self.caches = self.model.new_caches(BATCH, PROMPT + NEW)

    def tokens(self, step: Callable[..., Tensor] | None, prompt: Tensor | None = None) -> Tensor:
        ids = self.prompt if prompt is None else prompt
        return self.model.generate(ids, *self.tables, num_new_tokens=NEW, caches=self.caches, step=step)

    def seconds(self, step: Callable[..., Tensor] | None) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        self.tokens(step)
        torch.cuda.synchronize()
        return time.perf_counter() - started


def compared(dtype: str, device: torch.device) -> dict[str, Any]:
    """Steps that differ, and tokens per second of each."""
    decoder = Decoder(dtype, device)
    compiled = torch.compile(decoder.model.next_tokens, fullgraph=True, dynamic=False)
    with profiles.run(compiled, "graphed", is_compiled=True, name="next_tokens") as replayed:
        steps: dict[str, Any] = {"eager": None, "default": compiled, "graphed": replayed}
        tokens = {name: decoder.tokens(step) for name, step in steps.items()}
        short = decoder.prompt[:, 5:]
        is_short_equal = torch.equal(decoder.tokens(replayed, short), decoder.tokens(compiled, short))
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(ROUNDS):
            for name, step in steps.items():
                rounds[name].append(decoder.seconds(step))
        per_s = {name: round(BATCH * NEW / statistics.median(found), 1) for name, found in rounds.items()}
        return {
            "graphed_is_eager": torch.equal(tokens["graphed"], tokens["eager"]),
            "graphed_is_default": torch.equal(tokens["graphed"], tokens["default"]),
            "short_is_equal": is_short_equal,
            "distinct_tokens": len(tokens["graphed"].unique()),
            "captures": replayed.num_captures,
            "tokens_per_s": per_s,
        }


def main() -> None:
    (file,) = sys.argv[1:]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    wrong = []
    found = {}
    with tp_region(dist.get_world_size()):
        for dtype, must_be in MUST_BE.items():
            found[dtype] = one = compared(dtype, device)
            wrong += [f"{dtype}: {name} is False" for name in (*must_be, "short_is_equal") if not one[name]]
            if one["captures"] != 1:
                wrong.append(f"{dtype}: {one['captures']} captures")
            if dist.get_rank() == 0:
                Path(file).write_text(json.dumps(found))
                print(dtype, one, flush=True)
            torch.compiler.reset()
    dist.destroy_process_group()
    if wrong:
        sys.exit(f"rank {os.environ['RANK']}: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
