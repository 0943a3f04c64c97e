"""What recording executed lines costs: CPU time of a step with it over that without, interleaved rounds in one run.

    python scripts/bench_flow.py [--follow] [--python] [--rounds 15] [--out FILE]    # Python 3.12, transformers

Two loops that users write around a small Llama of transformers, in eager: `train` (forward, backward, clipping, AdamW)
and `decode` (greedy, with a cache, one token a step). Each round runs both modes once: off, and the user's file, with
--follow all of transformers as well. CPU time of the process, since the lines are recorded on the CPU; on a GPU that
hides it, the cost is smaller.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from tpcompile.recording import flow
from tpcompile.recording.flow import FlowRecorder

_STEPS = {"train": 24, "decode": 120}
"""Steps of one round that are measured."""
_WARM = {"train": 60, "decode": 300}
"""Steps before them: the interpreter specialises code anew after what is recorded of it has changed, once in a job."""
Modes = dict[str, tuple[str, ...] | None]


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def training() -> Callable[[], None]:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    ids = torch.randint(0, 256, (2, 16))

    def step() -> None:
        loss = network(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()

    return step


def decoding() -> Callable[[], None]:
    network = model().eval()
    state: dict[str, object] = {}
    prompt = torch.randint(0, 256, (2, 16))

    @torch.no_grad()
    def step() -> None:
        if state.get("length", 0) in (0, 48):  # a new request
            state.update(cache=None, ids=prompt, length=0)
        found = network(input_ids=state["ids"], past_key_values=state["cache"], use_cache=True)
        token = found.logits[:, -1:].argmax(-1)
        if bool((token == -1).any()):
            state["length"] = 0
            return
        state.update(cache=found.past_key_values, ids=token, length=int(state["length"]) + 1)

    return step


def round_of(
    step: Callable[[], None], num_warm: int, num_steps: int, follow: tuple[str, ...] | None
) -> tuple[float, float]:
    """(CPU ms a step, recorded steps of the program a step)."""
    recorder = FlowRecorder(follow or ())
    if follow is not None:
        why_not = recorder.start(secrets.token_hex(8))
        if why_not:
            raise SystemExit(f"error: {why_not}")
    for _ in range(num_warm):
        step()
    before = recorder.num_recorded
    start_s = time.process_time()
    for _ in range(num_steps):
        step()
    ms = (time.process_time() - start_s) / num_steps * 1e3
    num_recorded = (recorder.num_recorded - before) / num_steps
    recorder.stop()
    return ms, num_recorded


def measured(name: str, step: Callable[[], None], rounds: int, modes: Modes) -> dict[str, dict[str, float]]:
    for _ in range(3):
        step()
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    counts: dict[str, float] = {}
    for _ in range(rounds):
        for mode, follow in modes.items():
            ms, counts[mode] = round_of(step, _WARM[name], _STEPS[name], follow)
            times[mode].append(ms)
    found = {}
    for mode, own in times.items():
        ratios = [one / off for one, off in zip(own, times["off"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[mode] = {
            "cpu_ms": statistics.median(own), "ratio": middle, "quartiles": (low, high), "events_per_step": counts[mode]
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--follow", action="store_true", help="record transformers' lines as well")
    parser.add_argument("--python", action="store_true", help="the callbacks without a compiler")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.python:
        flow.compiled = lambda: None
        flow._BUDGET_IN_PYTHON = 1 << 40  # what an event costs, and not what is left of it
    modes: Modes = {"off": None, **({"and transformers": ("transformers",)} if asked.follow else {"user's file": ()})}
    torch.set_num_threads(1)
    loops = {"train": training(), "decode": decoding()}
    found = {name: measured(name, step, asked.rounds, modes) for name, step in loops.items()}
    for name, modes in found.items():
        for mode, row in modes.items():
            low, high = row["quartiles"]
            print(f"{name:7} {mode:17} {row['cpu_ms']:7.2f} ms CPU a step, ratio {row['ratio']:.4f} "
                  f"({low:.4f} to {high:.4f}), {row['events_per_step']:.0f} events a step")  # fmt: skip
    if asked.out:
        about = {
            "command": f"python scripts/bench_flow.py {' '.join(sys.argv[1:])}", "python": platform.python_version(),
            "torch": torch.__version__, "transformers": transformers.__version__, "machine": platform.machine(),
            "in_c": flow.compiled() is not None,
        }  # fmt: skip
        asked.out.write_text(json.dumps({"about": about, "loops": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
