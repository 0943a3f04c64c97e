"""Cost of a recorder: CPU time of a compile with and without it, also of 32 layers; and 50 manifests of one program.

    python scripts/bench_fusion.py OUT.json [--rounds 7]

Rounds alternate: each compiles the program anew (no cache, kernels are generated and not compiled) with and without a
recorder. A ratio is the median over rounds of their CPU times. Without a GPU the code is that for the CPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from tests.fusion.codegen import generating
from tests.fusion.models import FeedForward
from tpcompile.fusion.diff import Change, diff
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.recorder import FusionRecorder


def main() -> None:
    """Print one table, write OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    report = {
        "command": f"python scripts/bench_fusion.py OUT.json --rounds {arguments.rounds}",
        "machine": f"{platform.machine()}, torch {torch.__version__}",
        "layers": {str(layers): costs(layers, rounds) for layers, rounds in ((1, arguments.rounds), (8, 3), (32, 1))},
        "equal manifests of 50": equal_manifests(50),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    json.dump(report, sys.stdout, indent=1)
    print()


def program(layers: int) -> Callable[[], None]:
    """Forward and backward of a stack."""
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(32, 64) for _ in range(layers)))
    x = torch.randn(4, 32)

    def run() -> None:
        torch.compiler.reset()
        torch.compile(model)(x).sum().backward()

    return run


def costs(layers: int, rounds: int) -> dict[str, object]:
    """Seconds of CPU time, median, and their ratio, median of rounds."""
    run = program(layers)
    spent: dict[str, list[float]] = {"plain": [], "recorded": []}
    wall = made = 0.0
    with generating(), torch.compiler.config.patch(force_disable_caches=True):
        run()
        for _ in range(rounds):
            for name, seconds in spent.items():
                recorder = FusionRecorder() if name == "recorded" else None
                started, began = time.process_time(), time.monotonic()
                with recorder or nullcontext():
                    run()
                seconds.append(time.process_time() - started)
                wall = time.monotonic() - began
        started = time.process_time()
        manifest = recorder.manifest() if recorder else None
        made = time.process_time() - started
    ratios = [recorded / plain for plain, recorded in zip(spent["plain"], spent["recorded"], strict=True)]
    return {
        "rounds": rounds,
        "plain s": round(statistics.median(spent["plain"]), 3),
        "recorded s": round(statistics.median(spent["recorded"]), 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "wall s, recorded": round(wall, 2),
        "manifest s": round(made, 3),
        "launches": sum(len(graph.launches) for graph in manifest.graphs) if manifest else 0,
    }


def equal_manifests(number: int) -> int:
    """How many recordings of one program have no difference to the first."""
    run, found = program(1), []
    with generating(), torch.compiler.config.patch(force_disable_caches=True):
        for _ in range(number + 1):
            with FusionRecorder() as recorder:
                run()
            found.append(recorder.manifest())
    return sum(is_equal(found[0], one) for one in found[1:])


def is_equal(base: Manifest, new: Manifest) -> bool:
    return diff(base, new).change is Change.NONE


if __name__ == "__main__":
    main()
