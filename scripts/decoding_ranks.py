"""In a process of bench_decoding.py: a program's name -> its model, its tokens, and the times of its rounds."""

from __future__ import annotations

import argparse
import inspect
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

import tpcompile
from tpcompile.bench.step import finish
from tpcompile.bench.worker import Task, answer_all, in_group, machine, regions
from tpcompile.block_args import BlockArgs
from tpcompile.by_size import sums
from tpcompile.collectives.strategies import Collectives
from tpcompile.errors import ConfigError
from tpcompile.fastpath import Selection, tp_region
from tpcompile.gate.reference import free
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.fast_paths import use_fast_paths
from tpcompile.nn.state import load_full_state_dict

NO_TOKENS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
"""Nothing stops early."""
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip


def serve(connection: Connection, task: Task) -> None:
    """This rank of a program, until the connection is closed."""
    arguments = argparse.Namespace(**json.loads(task.settings))
    with in_group(connection, task, device=arguments.device) as (group, device):
        form = Theirs if task.program.startswith("transformers") else Ours
        decoder = Decoder(lambda: form(task.program, arguments, group, device), arguments.new, device)
        with tp_region(group.size()), torch.no_grad():
            answer_all(connection, decoder)
        decoder.release()


class Decoder:
    """A program, as the benchmark's processes ask for it."""

    def __init__(self, build: Callable[[], Ours | Theirs], num_new: int, device: torch.device) -> None:
        self._build, self._num_new, self._device = build, num_new, device

    def build(self) -> dict[str, Any]:
        """The program."""
        self._program = self._build()
        free(self._device)  # what was unsharded
        return {"notes": self._program.notes, "machine": machine(self._device)}

    def first_call(self) -> dict[str, Any]:
        """A prompt, and a prompt with one step."""
        for count in (1, 2):
            self._program.generate(count)
        finish(self._device)
        return {}

    def release(self) -> None:
        """CUDA graphs."""
        self._program.close()

    def warm(self) -> dict[str, Any]:
        """Tokens, regions and memory."""
        free(self._device)
        is_gpu = self._device.type == "cuda"
        if is_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self._program.generate(3)  # torch.compile records its own graphs at the second call
        # Before tpcompile captures one, whose replay enters none.
        regions_per_token = self._regions(3) - self._regions(2)
        self._program.capture()
        tokens_BT = self._program.generate(self._num_new)
        finish(self._device)
        return {
            "tokens": tokens_BT[:, -self._num_new :].tolist(),
            "regions_per_token": regions_per_token,
            "peak_gb": torch.cuda.max_memory_allocated(self._device) / 1e9 if is_gpu else None,
            "device_gb": in_use_gb(self._device) if is_gpu else None,
        }

    def _regions(self, count: int) -> float:
        return regions(lambda: self._program.generate(count))

    def round(self) -> dict[str, Any]:
        """Times."""
        return {"first_s": self._seconds(1), "all_s": self._seconds(self._num_new)}

    def _seconds(self, count: int) -> float:
        finish(self._device)
        dist.barrier()
        began = time.perf_counter()
        self._program.generate(count)
        finish(self._device)
        return time.perf_counter() - began


def in_use_gb(device: torch.device) -> tuple[float, float]:
    """By all processes, and all there is."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return (total_bytes - free_bytes) / 1e9, total_bytes / 1e9


class Model:
    """A config of transformers, its weights, and a prompt."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.length = arguments.prompt + arguments.new
        sizes = SMALL if arguments.small else LLAMA_8B
        lengths = {"num_hidden_layers": arguments.layers, "max_position_embeddings": self.length}
        self.config = LlamaConfig(**sizes, **lengths, **NO_TOKENS)
        dtype = getattr(torch, arguments.dtype)
        with torch.device("meta"):
            self.empty = LlamaForCausalLM._from_config(self.config, dtype=dtype).eval()
        self.weights = Drawn({name: one.shape for name, one in self.empty.named_parameters()}, dtype, device)
        generator = torch.Generator().manual_seed(1)
        shape = (arguments.batch, arguments.prompt)
        self.prompt = torch.randint(self.config.vocab_size, shape, generator=generator).to(device)


class Drawn(Mapping[str, Tensor]):
    """Parameters of transformers, drawn when they are read: equal on all ranks, in all programs."""

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._shapes, self._dtype, self._device = shapes, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        full = torch.ones(self._shapes[name], dtype=self._dtype, device=self._device)
        if name.endswith("norm.weight"):
            return full
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return full.normal_(std=0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


class Ours:
    """tpcompile's CausalLM; single tokens by a compiled step."""

    notes: str = "prompts in eager"

    def __init__(self, name: str, arguments: argparse.Namespace, group: Any, device: torch.device) -> None:
        from examples.checkpoints import llama

        given = Model(arguments, device)
        with torch.device("meta"):
            args = llama.block_args(given.config, dtype=arguments.dtype)
            sizes = {"num_layers": arguments.layers, "vocab_size": given.config.vocab_size}
            self._model = CausalLM(args, Collectives(group), **sizes)
        self._model.to_empty(device=device)
        load_full_state_dict(self._model, llama.key_map(given.config).to_full(given.weights))
        self._prompt = given.prompt
        self._tables = llama.rope_tables(given.config, given.length, device=device)
        self._caches = self._model.new_caches(arguments.batch, given.length)
        self._step: Callable[..., Tensor] | None = None
        self._profiled: tpcompile.profiles.Profiled | None = None
        if name == "eager":
            return
        stepping = self._model
        if ":fast" in name:
            stepping = self._with_fast_paths(args, sizes, arguments, group)
        all_reduce: Any = "by_size" if name.endswith("by-size") else "nccl"
        profile: Any = "graphed" if ":graphed" in name else "default"
        found = sums(all_reduce)
        compiled = torch.compile(
            stepping.next_tokens,
            fullgraph=True,
            dynamic=False,
            backend=arguments.backend,
            options=found.options if found is not None else None,
        )
        self._step = compiled
        self._profiled = tpcompile.run(
            compiled, profile, group=group, is_compiled=True, all_reduce=all_reduce, timeout_s=arguments.timeout_s
        )

    def _with_fast_paths(
        self, args: BlockArgs, sizes: dict[str, int], arguments: argparse.Namespace, group: Any
    ) -> CausalLM:
        """The model of single tokens: the same weights, and every fast path that can run."""
        with torch.device("meta"):
            stepping = CausalLM(args, Collectives(group), **sizes)
        stepping.load_state_dict(self._model.state_dict(), assign=True)
        decisions = use_fast_paths(
            stepping.stack,
            Selection(group, ask_table=False, timeout_s=arguments.timeout_s),
            batch=arguments.batch,
            seq_len=1,
            train=False,
            wait_s=arguments.timeout_s,
        )
        used = [path for path, decision in decisions.items() if decision.is_used]
        if not used:
            reasons = "; ".join(f"{path}: {decision.why}" for path, decision in decisions.items())
            raise ConfigError(f"no fast path is used here: {reasons}")
        self.notes = f"prompts in eager; single tokens with {', '.join(used)}"
        return stepping

    def generate(self, count: int) -> Tensor:
        """Prompt and new tokens."""
        tables, caches = self._tables, self._caches
        return self._model.generate(self._prompt, *tables, num_new_tokens=count, caches=caches, step=self._step)

    def capture(self) -> None:
        """From now on steps are those of the profile."""
        self._step = self._profiled

    def close(self) -> None:
        if self._profiled is not None:
            self._profiled.close()


class Theirs:
    """transformers' own plan and `generate`, always with the same cache: a graph reads a new one elsewhere."""

    def __init__(self, name: str, arguments: argparse.Namespace, group: Any, device: torch.device) -> None:
        from transformers import CompileConfig, StaticCache
        from transformers.distributed.configuration_utils import DistributedConfig

        given = Model(arguments, device)
        model: Any = given.empty
        settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=group.size()))
        model = model.maybe_distribute_model(model, settings, mesh).to_empty(device=device)
        model.model.rotary_emb = type(model.model.rotary_emb)(given.config).to(device)
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_as_placed(given.weights[parameter_name], parameter))
        mode = name.partition(":")[2] or "default"
        compiled = CompileConfig(mode=mode, fullgraph=True, dynamic=False, backend=arguments.backend)
        compiled._compile_all_devices = True
        self.notes = f"generate, compile mode {mode}"
        self._model, self._prompt, self._compiled = model, given.prompt, compiled
        self._cache = StaticCache(config=given.config, max_cache_len=given.length)
        self._cache_argument = cache_argument(model)

    def generate(self, count: int) -> Tensor:
        """Prompt and new tokens."""
        self._cache.reset()
        return self._model.generate(
            self._prompt,
            attention_mask=torch.ones_like(self._prompt),
            max_new_tokens=count,
            do_sample=False,
            compile_config=self._compiled,
            **{self._cache_argument: self._cache},
        )

    def capture(self) -> None:
        """torch.compile does, in its mode."""

    def close(self) -> None:
        """Its graphs too hold the communicator, and the end of the process group would wait for them."""
        torch.compiler.reset()


def cache_argument(model: Any) -> str:
    """Name of the argument that takes a cache: `past_key_values` until transformers renamed it, after 5.17."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _as_placed(full: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    return distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
