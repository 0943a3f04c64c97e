"""What a missed fusion costs: launches, bytes and time of programs of `repro/fusion/`, as they are and with what helps.

    python scripts/bench_known_misses.py OUT.json [--device cuda] [--rounds 20]

Rounds alternate between the variants; a time is the median over rounds, the first rounds left out. On a GPU it is that
of CUDA events around 10 calls, on the CPU wall time.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from repro.fusion import missed_programs
from tpcompile.fusion.manifest import total
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.target import TargetContext
from tpcompile.torch_api.simulated import local_ranks

_CALLS = 10
_WARM_UP = 5
_ROWS = 65536
VARIANTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "pytorch 161138": {
        "as it is": ("metrics", {}),
        "triton.cooperative_reductions": ("metrics", {"triton.cooperative_reductions": True}),
        "split_reductions=False": ("metrics", {"split_reductions": False}),
    },
    "pytorch 142316": {
        "as it is": ("small_product_first", {}),
        "realize_reads_threshold=8": ("small_product_first", {"realize_reads_threshold": 8}),
        "different order": ("large_product_first", {}),
    },
}


def main() -> None:
    """Print one table, write OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    report = {"command": " ".join(("python scripts/bench_known_misses.py OUT.json", *sys.argv[2:])), **machine(device)}
    report["programs"] = {issue: compared(ways, device, arguments.rounds) for issue, ways in VARIANTS.items()}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for issue, rows in report["programs"].items():
        for name, row in rows.items():
            print(f"{issue:16} {name:32} {row['launches']} launches {row['bytes']:>12,} B {row['ms']:8.4f} ms")


def machine(device: torch.device) -> dict[str, Any]:
    """Where it ran."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {"torch": torch.__version__, "device": name}


def compared(ways: dict[str, tuple[str, dict[str, Any]]], device: torch.device, rounds: int) -> dict[str, Any]:
    """Each way with its launches, its bytes, and its time of a call."""
    steps, rows = {}, {}
    for name, (build, options) in ways.items():
        steps[name], rows[name] = compiled(build, options, device)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_WARM_UP + rounds):
        for name, step in steps.items():
            spent[name].append(measured_ms(step, device))
    for name, times in spent.items():
        rows[name]["ms"] = statistics.median(times[_WARM_UP:])
    return rows


def compiled(build: str, options: dict[str, Any], device: torch.device) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A call of the compiled program, and what it launches."""
    torch.compiler.reset()
    with local_ranks(1):
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("tp",))
        settings = {"rows": _ROWS}
        context = TargetContext(rank=0, world_size=1, device=device, mesh=mesh, settings=settings)
        target = getattr(missed_programs, build)(context)
    function = torch.compile(target.program, options=options or None, dynamic=False)
    with FusionRecorder() as recorder:
        function(*target.inputs)
    (graph,) = recorder.manifest().graphs
    totals = total(graph.launches)
    row = {"launches": totals.kernels, "bytes": totals.bytes, "is aligned": graph.is_aligned}
    return lambda: function(*target.inputs), row


def measured_ms(step: Callable[[], Any], device: torch.device) -> float:
    """Of one call, over several."""
    if device.type != "cuda":
        started = time.perf_counter()
        for _ in range(_CALLS):
            step()
        return 1000 * (time.perf_counter() - started) / _CALLS
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(_CALLS):
        step()
    after.record()
    torch.cuda.synchronize()
    return float(before.elapsed_time(after)) / _CALLS


if __name__ == "__main__":
    main()
