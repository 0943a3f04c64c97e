"""Bytes of a manifest beside those that the memory of a GPU moves, for five programs that its bandwidth limits.

    python scripts/fusion_bytes.py OUT.json                                  one GPU with 16 GB free
    python scripts/fusion_bytes.py OUT.json --device cpu --elements 65536    a trial

Operands have 2 GiB, so that what the L2 cache still holds when a kernel ends is less than 3 % of its bytes. Counters
are those of Nsight Compute: DRAM bytes read and written by each kernel of one step. Where it is missing or refused, the
report holds its words, and the bandwidth that the manifest's bytes would mean, beside that of a copy. Prints a table.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tpcompile.fusion.manifest import total
from tpcompile.fusion.manifest_records import Launch, Role
from tpcompile.fusion.recorder import FusionRecorder

WIDTH = 4096
ITEM = 2
"""Bytes of a bfloat16."""
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NUM_TIMED = 20


@dataclass(frozen=True)
class Program:
    """A function of one or two matrices; `passes` are the matrices that it must at least read and write."""

    function: Callable[..., Tensor]
    num_inputs: int
    passes: int


PROGRAMS = {
    "pointwise add": Program(lambda x_RW, y_RW: x_RW * 2 + y_RW, 2, 3),
    "softmax of rows": Program(lambda x_RW: torch.softmax(x_RW, -1), 1, 2),
    "layer norm": Program(lambda x_RW: F.layer_norm(x_RW, (x_RW.shape[-1],)), 1, 2),
    "transposed copy": Program(lambda x_RW: x_RW.t().contiguous(), 1, 2),
    "sum": Program(lambda x_RW: x_RW.sum(dtype=torch.float32), 1, 1),
}  # R rows, W width


def main() -> None:
    """Write the report, then print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--elements", type=int, default=1 << 30)
    parser.add_argument("--one-step", action="store_true", help="run one step of each for a profiler")
    args = parser.parse_args()
    steps = {name: step(program, args.device, args.elements) for name, program in PROGRAMS.items()}
    if args.one_step:
        for run in steps.values():
            run()
        return
    programs = {name: row(PROGRAMS[name], run, args) for name, run in steps.items()}
    report = {"machine": machine(args), "copy_gb_per_s": copy_gb_per_s(args), "programs": programs}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    report |= counters(args, programs)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))


def machine(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device == "cuda"
    return {
        "command": " ".join(["python", "scripts/fusion_bytes.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size if on_gpu else 0,
        "operand_bytes": args.elements * ITEM,
    }


def step(program: Program, device: str, elements: int) -> Callable[..., list[float]]:
    """Runs the compiled program so many times; its inputs live no longer, and one program at a time holds memory."""
    compiled = torch.compile(program.function, dynamic=False)
    shape = (elements // WIDTH, WIDTH)

    def run(times: int = 1) -> list[float]:
        inputs = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(program.num_inputs)]
        return timed(lambda: compiled(*inputs), device, times)

    return run


def timed(call: Callable[[], Any], device: str, times: int) -> list[float]:
    """Milliseconds of each call, after one that compiles; on a GPU queued, so that no launch is waited for.

    A profiler sees those calls alone.
    """
    call()
    if device != "cuda":
        return [milliseconds(call) for _ in range(times)]
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def milliseconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - started)


def row(program: Program, run: Callable[..., list[float]], args: argparse.Namespace) -> dict[str, Any]:
    torch.compiler.reset()
    with FusionRecorder() as recorder:
        times_ms = run(NUM_TIMED)
    (graph,) = recorder.manifest().graphs
    moved, median_ms = total(graph.launches).bytes, statistics.median(times_ms)
    return {
        "launches": [launch_row(one) for one in graph.launches],
        "is_aligned": graph.is_aligned,
        "manifest_bytes": moved,
        "least_bytes": program.passes * args.elements * ITEM,
        "median_ms": median_ms,
        "gb_per_s": moved / median_ms / 1e6,
    }


def launch_row(launch: Launch) -> dict[str, Any]:
    kept = {"name", "kind", "resources"}
    return {
        **launch.model_dump(mode="json", include=kept),
        "bytes": launch.bytes,
        "is_kernel": launch.role is Role.KERNEL,
    }


def copy_gb_per_s(args: argparse.Namespace) -> float:
    """Bytes read and written by a copy of one operand."""
    source = torch.randn(args.elements, device=args.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    times_ms = timed(lambda: target.copy_(source), args.device, NUM_TIMED)
    return 2 * args.elements * ITEM / statistics.median(times_ms) / 1e6


# Nsight Compute


def counters(args: argparse.Namespace, programs: dict[str, Any]) -> dict[str, Any]:
    """Adds the counters to the programs; returns what the report says of the tool."""
    tool = shutil.which("ncu") or next(iter(installed()), None)
    if args.device != "cuda" or tool is None:
        return {"nsight_compute": "not installed", "refused": ""}
    command = [tool, "--csv", "--print-units", "base", "--metrics", ",".join(METRICS), "--profile-from-start", "off"]
    command += ["--clock-control", "none", sys.executable, *sys.argv, "--one-step"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    except subprocess.TimeoutExpired:
        return {"nsight_compute": tool, "refused": "it did not end within 45 s"}
    errors = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==ERROR==")]
    if done.returncode or errors:
        return {"nsight_compute": tool, "refused": "\n".join(errors) or done.stderr[-500:]}
    add_counters(programs, list(measured(done.stdout.splitlines())))
    return {"nsight_compute": tool, "refused": ""}


def installed() -> list[str]:
    places = ("usr/local/cuda*/bin/ncu", "opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/nsight-compute*/ncu")
    return [str(path) for place in places for path in sorted(Path("/").glob(place))]


def measured(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Name and DRAM bytes of each kernel, in order."""
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, tuple[str, int]] = {}
    for fields in csv.DictReader(lines[start:]):
        number = int(float(fields["Metric Value"].replace(",", "")))
        _name, moved = kernels.get(fields["ID"], ("", 0))
        kernels[fields["ID"]] = fields["Kernel Name"], moved + number
    yield from kernels.values()


def add_counters(programs: dict[str, Any], kernels: list[tuple[str, int]]) -> None:
    """In order: each program has as many kernels as its manifest."""
    for found in programs.values():
        own = [kernels.pop(0) for _ in found["launches"] if kernels]
        found["kernels"] = [name for name, _ in own]
        found["dram_bytes"] = sum(moved for _, moved in own)
        found["manifest_of_dram"] = found["manifest_bytes"] / found["dram_bytes"] if own else None


def table(report: dict[str, Any]) -> Iterator[str]:
    copied = report["copy_gb_per_s"]
    yield f"{report['machine']['device']}: a copy moves {copied:.0f} GB/s; Nsight Compute: {report['nsight_compute']}"
    if report["refused"]:
        yield f"refused: {report['refused']}"
    yield f"{'program':16} launches  manifest MB   least MB    DRAM MB       ms  of copy"
    for name, found in report["programs"].items():
        manifest, least, dram = (found.get(key, 0) / 1e6 for key in ("manifest_bytes", "least_bytes", "dram_bytes"))
        share = found["gb_per_s"] / copied
        number = len(found["launches"])
        yield f"{name:16} {number:8} {manifest:12.1f} {least:10.1f} {dram:10.1f} {found['median_ms']:8.3f} {share:8.2f}"


if __name__ == "__main__":
    main()
