"""What `tpcompile run` costs a job: the same loop bare, logged and watched, in turn, as processes of their own.

    python scripts/bench_run.py --rounds 6 --json results/bench_run_cpu.json

The program is this file under torchrun: two compiled layers, backward, all-reduces of the gradients, an optimizer, on
2 ranks. Of each job the time of a steady step (median over all but the first), of the first step, which compiles, and
of the whole job are kept; what is printed are ratios of neighbours, over bare: median and quartiles over the rounds.
A logged job has TORCH_TRACE alone, which `tpcompile run` sets as well: the rest of what a watched one costs is the
sentinel's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 300
SIZE = 256


def program(out: Path) -> None:
    """One rank of the job."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.GELU(), torch.nn.Linear(SIZE, SIZE))
    step_of = torch.compile(layer, backend="aot_eager")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    batch = torch.randn(64, SIZE)
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        loss = step_of(batch).square().mean()
        loss.backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(times))
    dist.destroy_process_group()


FORMS = ("bare", "logged", "watched")


def job(folder: Path, form: str) -> dict[str, float]:
    """Run the job once; seconds."""
    out = folder / "times.json"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        str(out),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    if form == "logged":
        environ["TORCH_TRACE"] = str(folder / "trace")
    if form == "watched":
        command = [sys.executable, "-m", "tpcompile", "run", "-q", "--run-dir", str(folder / "run"), "--", *command]
    began = time.perf_counter()
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, timeout=300)
    wall = time.perf_counter() - began
    if ended.returncode:
        raise SystemExit(f"the {form} job ended with {ended.returncode}:\n{ended.stderr}")
    times = json.loads(out.read_text())
    return {"step": statistics.median(times[1:]), "first step": times[0], "job": wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        took = {}
        for form in FORMS[number % 3 :] + FORMS[: number % 3]:
            with tempfile.TemporaryDirectory() as folder:
                took[form] = job(Path(folder), form)
        rounds.append(took)
        print(number, {name: round(took["watched"][name] / took["bare"][name], 3) for name in took["bare"]}, flush=True)
    ratios = {}
    for form in FORMS[1:]:
        for name in rounds[0]["bare"]:
            found = [took[form][name] / took["bare"][name] for took in rounds]
            ratios[f"{form}, {name}"] = statistics.quantiles(found, n=4)
    for name, (low, middle, high) in ratios.items():
        print(f"{name}: x {middle:.3f} ({low:.3f} to {high:.3f})")
    if arguments.json:
        import torch

        found = {
            "command": "python " + " ".join(sys.argv), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(), "torch": torch.__version__, "steps": STEPS, "ratios": ratios,
            "rounds": rounds,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if "RANK" in os.environ:
        program(Path(sys.argv[1]))
    else:
        main()
