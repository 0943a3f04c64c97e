"""Time to decide about a fast path, with and without a warning of different grids: ms after the last rank asks.

    torchrun --standalone --nproc-per-node 8 scripts/bench_decision.py OUT.json

No GPU. Each decision is about a different shape class. Ranks ask after a barrier, at slightly different times: the time
runs from the question of the last rank to the answer of the last rank. In half of the decisions, the tables of odd
ranks have 28 programs and those of even ranks 24: the time then includes the one warning on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.fastpath import Selection, fast_path, selection
from tpcompile.fastpath.measured import Ratio

NUM_DECISIONS = 50
TOKENS = 256
KINDS = ("equal grids", "24 and 28 programs")


def plain(x: Tensor) -> Tensor:
    return x * 2


@fast_path("bench", replaces=plain, tp="pointwise")
def launch(x: Tensor, *, exchange: Any) -> Tensor:
    return x * 2


def table() -> list[Ratio]:
    """A cell for each decision; odd cells have a different grid on odd ranks."""
    known = {"path": "bench", "gpu": selection.Processor.here().model, "dtype": "bfloat16", "tokens": TOKENS}
    known |= {"tp": dist.get_world_size(), "ratio_to_inductor": 2.0, "command": "", "versions": {}}
    grids = (24, 24 + 4 * (dist.get_rank() % 2))
    return [
        Ratio.model_validate({**known, "widths": (width,), "num_programs": grids[width % 2]})
        for width in range(2 * NUM_DECISIONS)
    ]


def decided() -> list[tuple[float, float]]:
    """For each decision, when this rank asked and when it had the answer, on the clock of the machine."""
    group = dist.group.WORLD
    assert group is not None
    selecting = Selection(group, table=table())
    times = []
    for width in range(2 * NUM_DECISIONS):
        dist.barrier()
        asked = time.monotonic()
        decision = selecting.decide("bench", ((TOKENS, width),), torch.bfloat16)
        times.append((asked, time.monotonic()))
        is_named = "num_programs=24 on rank" in decision.why and "num_programs=28 on rank" in decision.why
        assert (decision.is_used, is_named) == ((True, False), (False, True))[width % 2], decision
    return times


def milliseconds(ranks: list[list[tuple[float, float]]]) -> list[float]:
    """For each decision, ms from the last question to the last answer."""
    found = []
    for times in zip(*ranks, strict=True):
        last_asked = max(asked for asked, _ in times)
        found.append(1e3 * (max(known for _, known in times) - last_asked))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    selection.uncertified = lambda path, **_: ""  # the launcher is none
    dist.init_process_group("gloo")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, decided())
    if dist.get_rank() == 0:
        report: dict[str, Any] = {
            "command": f"torchrun --standalone --nproc-per-node {len(ranks)} " + " ".join(sys.argv),
            "machine": f"CPU, {os.cpu_count()} cores, {platform.machine()}; load {os.getloadavg()[0]:.1f}",
            "torch": torch.__version__,
        }
        for offset, kind in enumerate(KINDS):
            spent = milliseconds(ranks)[offset::2]
            report[kind] = {
                "decisions": len(spent),
                "median_ms": round(statistics.median(spent), 1),
                "worst_ms": round(max(spent), 1),
            }
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
