"""What `Sentinel.agree` costs: a training step with it over one without, interleaved rounds in one run.

    torchrun --standalone --nproc-per-node 2 scripts/bench_agree.py [--rounds 40] [--steps 20] [--out FILE]

The step is forward, backward, clipping and SGD of a stack of layers, with an all-reduce, under a sentinel in both
cases. Each step with it says that four values are equal: sampled tokens, the choices of a router, the loss and the
gradient norm; and every `--every` steps all parameters. Time is that of a round, ended by a wait for the device; CPU
time is that of all threads of the process, which other processes of the host do not change. On GPUs, torch counts the
synchronisations of the calls; one `.item()` is the control of this count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tpcompile.collectives import all_reduce
from tpcompile.sentinel import Sentinel

# B tokens of a batch, D features, V vocabulary, E experts.
Values = dict[str, Tensor]
_V, _E = 1024, 8
_SYNC = "synchronizing CUDA operation"
"""What torch's sync debug mode says."""


class Trainer:
    """The step, and the values of it that must be equal."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = {"device": device, "dtype": dtype}
        width = options.width
        layers = [nn.Sequential(nn.Linear(width, width, **made), nn.GELU()) for _ in range(options.layers)]
        self.model = nn.Sequential(*layers, nn.Linear(width, _V, **made))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x_BD = torch.randn(options.tokens, width, **made)
        self.target_B = torch.randint(_V, (options.tokens,), device=device)

    def step(self) -> Values:
        """One step."""
        logits_BV = all_reduce(self.model(self.x_BD), group=dist.group.WORLD) / dist.get_world_size()
        loss = nn.functional.cross_entropy(logits_BV.float(), self.target_B)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens_B = logits_BV.argmax(1)
        return {"tokens": tokens_B, "experts": (tokens_B % _E).int(), "loss": loss, "gradient norm": norm}

    def agree(self, sentinel: Sentinel, values: Values, *, every: int) -> None:
        """Say what must be equal after it."""
        for name, value in values.items():
            sentinel.agree(name, value)
        sentinel.agree("parameters", dict(self.model.named_parameters()), every=every)


def finish(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Round(NamedTuple):
    """Time of one step, of as many in a row."""

    ms: float
    cpu_ms: float


def timed(step: Callable[[], object], steps: int, device: torch.device) -> Round:
    """A round of that many steps, begun by all ranks together."""
    dist.barrier()
    finish(device)
    start, start_cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    finish(device)
    took, took_cpu = time.perf_counter() - start, time.process_time() - start_cpu
    return Round(1e3 * took / steps, 1e3 * took_cpu / steps)


def num_synchronisations(act: Callable[[], object], device: torch.device) -> int | None:
    """How often `act` waits for the device; None without one."""
    if device.type != "cuda":
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            act()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(_SYNC in str(one.message) for one in caught)


def host_us(act: Callable[[], object], device: torch.device, calls: int = 200) -> float:
    """Time of the calling thread in `act`, while the device has nothing else to do."""
    took = []
    for _ in range(calls):
        finish(device)
        start = time.perf_counter()
        act()
        took.append(time.perf_counter() - start)
    return 1e6 * statistics.median(took)


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Medians with and without it, the ratio within a round, and what the calls do."""
    trainer = Trainer(options, device)
    with Sentinel(prints=dist.get_rank() == 0) as sentinel:

        def agreeing() -> None:
            trainer.agree(sentinel, trainer.step(), every=options.every)

        timed(agreeing, options.every + 1, device)
        before = sentinel.log.num_operations
        on: list[Round] = []
        off: list[Round] = []
        for number in range(options.rounds):
            for is_on in (number % 2 == 0, number % 2 == 1):  # alternate the order
                took = timed(agreeing if is_on else trainer.step, options.steps, device)
                (on if is_on else off).append(took)
        operations = sentinel.log.num_operations - before
        values = trainer.step()
        synchronisations = {
            "agree": num_synchronisations(lambda: trainer.agree(sentinel, values, every=1), device),
            "item (control)": num_synchronisations(lambda: values["loss"].item(), device),
        }
        one = host_us(lambda: sentinel.agree("loss", values["loss"]), device)
        num_findings = len(sentinel.findings)
    return {
        "time": compared([one.ms for one in on], [one.ms for one in off]),
        "cpu_time": compared([one.cpu_ms for one in on], [one.cpu_ms for one in off]),
        "host_us_of_one_call": one,
        "synchronisations": synchronisations,
        "store_operations": operations,
        "findings": num_findings,
        "rounds": options.rounds,
        "steps": options.steps,
        "every": options.every,
    }


def compared(on: list[float], off: list[float]) -> dict[str, Any]:
    """Medians, and those of the ratios within rounds, with quartiles."""
    ratios = [with_it / without for with_it, without in zip(on, off, strict=True)]
    return {
        "on_ms": statistics.median(on),
        "off_ms": statistics.median(off),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
    }


def table(found: dict[str, Any]) -> str:
    """What is measured, one line each."""
    rows = [
        f"time of a step          {_ratio_text(found['time'])}",
        f"CPU time of a step      {_ratio_text(found['cpu_time'])}",
        f"one call on the host    {found['host_us_of_one_call']:9.1f} us",
        f"synchronisations        {found['synchronisations']}",
        f"store operations        {found['store_operations']} in {2 * found['rounds'] * found['steps']} steps",
    ]
    return "\n".join(rows)


def _ratio_text(row: dict[str, Any]) -> str:
    low, high = row["ratio_quartiles"]
    without = f"{row['off_ms']:9.3f} ms without, {row['on_ms']:9.3f} ms with agree"
    return f"{without}: {row['ratio']:.4f} times as long (quartiles {low:.4f}-{high:.4f})"


def arguments(*, is_cuda: bool) -> argparse.Namespace:
    """The command line; sizes for a step of some 20 to 40 ms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--every", type=int, default=50, help="steps between comparisons of the parameters")
    parser.add_argument("--width", type=int, default=4096 if is_cuda else 512)
    parser.add_argument("--layers", type=int, default=16 if is_cuda else 4)
    parser.add_argument("--tokens", type=int, default=8192 if is_cuda else 512)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    """Measure and print; rank 0 writes."""
    is_cuda = torch.cuda.is_available()
    options = arguments(is_cuda=is_cuda)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo")
    torch.set_num_threads(1)
    found = measure(options, device)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if is_cuda else f"{os.cpu_count()} cores"
        found["made_with"] = {
            "command": f"torchrun --nproc-per-node {dist.get_world_size()} {' '.join(sys.argv)}",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.machine()}, {name}",
        }
        print(table(found))
        if options.out:
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
