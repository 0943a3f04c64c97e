"""Tokens per second of greedy decoding beside transformers' tensor parallelism, on a Llama that is made from a config.

    python scripts/bench_decoding.py --nproc 2 --json FILE [--layers 32] [--programs ours:graphed,transformers]

eager                          ours in eager mode: its tokens are what the others' are compared with
ours, ours:graphed, ours:graphed:by-size
                               ours compiled; single tokens by `tpcompile.run(model.next_tokens, "graphed")`
transformers, transformers:reduce-overhead
                               its plan `tp_plan="auto"`, a static cache, and a compiled step of `generate` in that mode

All have the same weights, drawn by transformers with one seed. Each program is in processes of its own, which are asked
in turn; a round is a prompt and all new tokens, and the same prompt with one new token: the rate is that of the tokens
between. In bfloat16 a rounding can decide between two tokens; `equal` counts those before the first that differs, and
`--dtype float32` is the comparison of greedy tokens. Exit status 1 when a program of ours fails, or when its tokens
differ in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tpcompile
from tpcompile.collectives.strategies import Collectives
from tpcompile.fastpath import tp_region
from tpcompile.nn.causal_lm import CausalLM
from tpcompile.nn.state import load_full_state_dict
from tpcompile.ranks.env import choose_device, process_group, rank_env

ROOT = Path(__file__).resolve().parents[1]
WORKER = "worker"
EAGER = "eager"
PROGRAMS = (
    EAGER, "ours", "ours:graphed", "ours:graphed:by-size", "transformers", "transformers:reduce-overhead",
)  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 64,
}  # fmt: skip
Generate = Callable[[int], Tensor]
"""Number of new tokens -> prompt and new tokens."""


def main() -> int:
    if sys.argv[1:2] == [WORKER]:
        return worker(argparse.Namespace(**json.loads(sys.argv[2])))
    return launcher(parsed())


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.programs.split(",")) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown programs: {', '.join(sorted(unknown))}; choose from {', '.join(PROGRAMS)}")
    if arguments.new < 2 or arguments.rounds < 1:
        parser.error(f"--new {arguments.new} --rounds {arguments.rounds}: at least 2 new tokens and 1 round")
    return arguments


# The process that asks


class Program:
    """The ranks of one, under torchrun."""

    def __init__(self, name: str, arguments: argparse.Namespace, store: dist.TCPStore, logs: Path) -> None:
        self.name, self._store, self._timeout_s = name, store, arguments.timeout_s
        self.log = logs / f"{name.replace(':', '-')}.log"
        given = {**vars(arguments), "json": None, "program": name, "turns": store.port}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.nproc)]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *torchrun, __file__, WORKER, json.dumps(given)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        self.rows: list[dict[str, float]] = []
        self.why_not = ""

    def answer(self, key: str) -> Any:
        """What rank 0 has said; None, and `why_not`, when the program has ended or is late."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check([f"{self.name}/{key}"]):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.why_not = self._reason()
                self.end()
                return None
            time.sleep(0.05)
        return json.loads(self._store.get(f"{self.name}/{key}"))

    def ask(self, number: int) -> None:
        """For one round."""
        self._store.set(f"{self.name}/go/{number}", "")
        found = self.answer(f"round/{number}")
        if found is not None:
            self.rows.append(found)

    def end(self) -> None:
        """Torchrun ends its ranks."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def leave(self) -> None:
        """Tell the ranks to exit."""
        if not self.why_not:
            self._store.set(f"{self.name}/go/end", "")
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self.why_not = "its ranks did not end"
                self.end()

    def _reason(self) -> str:
        """The last error in its log."""
        if self._process.poll() is None:
            return f"no answer within {self._timeout_s:.0f} s"
        error = first_error(self.log.read_text(errors="replace"))
        return error or f"it ended with {self._process.returncode}"


def first_error(log: str) -> str:
    """The last line of the first traceback of a rank; empty when there is none."""
    found = re.search(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w+Error: .*)$", log, re.MULTILINE)
    return found[1][:300] if found else ""


def launcher(arguments: argparse.Namespace) -> int:
    """Start one program after the other, then rounds in turn; a table, JSON, and whether ours are right."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    wanted = arguments.programs.split(",")
    names = [EAGER, *(name for name in wanted if name != EAGER)]
    with tempfile.TemporaryDirectory() as folder:
        programs, ready = [], {}
        try:
            for name in names:
                programs.append(Program(name, arguments, store, Path(folder)))
                ready[name] = programs[-1].answer("ready")
                print(f"{name}: {programs[-1].why_not or 'ready'}", flush=True)
            for number in range(arguments.rounds):
                for program in programs[number % len(programs) :] + programs[: number % len(programs)]:
                    if not program.why_not:
                        program.ask(number)
            for program in programs:
                program.leave()
        finally:
            for program in programs:
                program.end()
    rows = [row_of(program, ready[program.name], ready[EAGER], arguments) for program in programs]
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine(arguments, ready[EAGER]), "rows": rows}
    for row in rows:
        print(shown(row))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    ours = [row for row in rows if not row["name"].startswith("transformers")]
    is_exact = arguments.dtype == "float32"
    return int(any(row["why_not"] or (is_exact and row["equal"] < arguments.new) for row in ours))


def row_of(program: Program, ready: Any, eager: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the table."""
    row: dict[str, Any] = {"name": program.name, "why_not": program.why_not}
    if program.why_not or not program.rows:
        return row
    per_s = [arguments.batch * (arguments.new - 1) / (one["all_s"] - one["first_s"]) for one in program.rows]
    row |= {
        "tokens_per_s": statistics.median(per_s),
        "spread": [min(per_s), max(per_s)],
        "prompt_ms": statistics.median(one["first_s"] for one in program.rows) * 1e3,
        "peak_gb": ready["peak_gb"],
        "notes": ready["notes"],
    }
    if eager is not None:
        row["equal"] = equal_tokens(ready["tokens"], eager["tokens"])
    return row


def equal_tokens(found: list[list[int]], expected: list[list[int]]) -> int:
    """New tokens before the first that differs, of the sequence in which that comes first."""
    return min(
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), len(pair[0]))
        for pair in zip(found, expected, strict=True)
    )


def shown(row: dict[str, Any]) -> str:
    if "tokens_per_s" not in row:
        return f"{row['name']:30} {row['why_not']}"
    equal = row.get("equal", "-")
    return f"{row['name']:30} {row['tokens_per_s']:9.1f} tokens/s  prompt {row['prompt_ms']:8.2f} ms  equal {equal}"


def machine(arguments: argparse.Namespace, ready: Any) -> dict[str, Any]:
    fields = ("nproc", "layers", "dtype", "batch", "prompt", "new", "rounds")
    return {name: getattr(arguments, name) for name in fields} | (ready["machine"] if ready else {})


# The ranks


def worker(arguments: argparse.Namespace) -> int:
    """Answer rounds until the end."""
    env = rank_env()
    device = choose_device(arguments.device, env)
    turns = dist.TCPStore("127.0.0.1", arguments.turns, is_master=False, timeout=timedelta(seconds=3600))
    name, is_first = arguments.program, env.rank == 0

    def say(key: str, value: Any) -> None:
        if is_first:
            turns.set(f"{name}/{key}", json.dumps(value))

    with process_group(env, device, timeout_s=arguments.timeout_s) as group, tp_region(group.size()), torch.no_grad():
        generate, end, notes = built(name, arguments, group, device)
        for count in (1, arguments.new, arguments.new):  # compiled, captured, replayed
            tokens = generate(count)
        finish(device)
        peak = torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None
        new = tokens[:, arguments.prompt :].tolist()
        say("ready", {"tokens": new, "peak_gb": peak, "notes": notes, "machine": versions(device)})
        number = 0
        while not is_over(turns, name, number):
            first_s, all_s = (seconds(generate, count, device) for count in (1, arguments.new))
            say(f"round/{number}", {"first_s": first_s, "all_s": all_s})
            number += 1
        end()
    return 0


def is_over(turns: dist.TCPStore, name: str, number: int) -> bool:
    """Wait for the next round, or for the end."""
    while True:
        if turns.check([f"{name}/go/{number}"]):
            return False
        if turns.check([f"{name}/go/end"]):
            return True
        time.sleep(1e-3)


def seconds(generate: Generate, count: int, device: torch.device) -> float:
    finish(device)
    dist.barrier()
    began = time.perf_counter()
    generate(count)
    finish(device)
    return time.perf_counter() - began


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def versions(device: torch.device) -> dict[str, str]:
    import transformers

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def built(
    name: str, arguments: argparse.Namespace, group: Any, device: torch.device
) -> tuple[Generate, Callable[[], None], str]:
    """A program, what ends it, and what is to be known of it."""
    from transformers import LlamaConfig

    length = arguments.prompt + arguments.new
    sizes = SMALL if arguments.small else LLAMA_8B
    config = LlamaConfig(**sizes, num_hidden_layers=arguments.layers, max_position_embeddings=length)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(config.vocab_size, (arguments.batch, arguments.prompt), generator=generator).to(device)
    if name.startswith("transformers"):
        return theirs(name, config, arguments, group, prompt)
    return ours(name, config, arguments, group, prompt)


def drawn(config: Any, dtype: str, device: torch.device) -> Any:
    """The whole model of transformers: the same weights in all programs."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with device:
        return LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype)).eval()


def ours(
    name: str, config: Any, arguments: argparse.Namespace, group: Any, prompt: Tensor
) -> tuple[Generate, Callable[[], None], str]:
    from examples.checkpoints import llama

    device = prompt.device
    with torch.device("meta"):
        args = llama.block_args(config, dtype=arguments.dtype)
        sizes = {"num_layers": arguments.layers, "vocab_size": config.vocab_size}
        model = CausalLM(args, Collectives(group), **sizes)
    model.to_empty(device=device)
    whole = drawn(config, arguments.dtype, device)
    load_full_state_dict(model, llama.key_map(config).to_full(whole.state_dict()))
    del whole
    empty_cache(device)
    length = arguments.prompt + arguments.new
    tables = llama.rope_tables(config, length, device=device)
    caches = model.new_caches(arguments.batch, length)
    step: Any = None
    if name != EAGER:
        all_reduce: Any = "by_size" if name.endswith("by-size") else "nccl"
        profile: Any = "graphed" if ":graphed" in name else "default"
        step = tpcompile.run(
            model.next_tokens, profile, group=group, all_reduce=all_reduce, dynamic=False, timeout_s=arguments.timeout_s
        )

    def generate(count: int) -> Tensor:
        return model.generate(prompt, *tables, num_new_tokens=count, caches=caches, step=step)

    return generate, step.close if step is not None else lambda: None, "prompts in eager"


def theirs(
    name: str, config: Any, arguments: argparse.Namespace, group: Any, prompt: Tensor
) -> tuple[Generate, Callable[[], None], str]:
    from transformers import CompileConfig
    from transformers.distributed.configuration_utils import DistributedConfig

    model = drawn(config, arguments.dtype, prompt.device)
    settings, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_plan="auto", tp_size=group.size()))
    model = model.maybe_distribute_model(model, settings, mesh)
    empty_cache(prompt.device)
    mode = name.partition(":")[2] or "default"
    compiled = CompileConfig(mode=mode, fullgraph=True, dynamic=False)
    compiled._compile_all_devices = True
    mask = torch.ones_like(prompt)

    def generate(count: int) -> Tensor:
        found: Tensor = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
            compile_config=compiled,
        )
        return found

    return generate, lambda: None, f"generate, compile mode {mode}"


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


if __name__ == "__main__":
    sys.exit(main())
