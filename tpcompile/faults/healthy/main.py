"""How often we cry wolf: N runs of correct programs, each must be green.

    python scripts/clean_runs.py --runs 20 --nproc 2 --preset cpu_smoke [--train] [--json FILE]
    python scripts/clean_runs.py --what sentinel --runs 200 [--programs NAME ...] [--device cuda] [--json FILE]
    python scripts/clean_runs.py --what sentinel --runs 100 --part 1/2 --json A & # and 2/2, B: beside each other, then
    python scripts/clean_runs.py --merge A B --json FILE

`--what gate` runs our block through the gate. `--what sentinel` runs the programs of `clean_programs.py` in rotation,
their parameters drawn anew, each under a sentinel that stops the job when it finds something.

Every process gets a PYTHONHASHSEED of its own, and every rank its own Inductor cache. Runs cycle through states of
these caches: cold (all empty), warm (all filled by the run before), split (filled, but for the last rank's); with the
sentinel also shared (one empty cache for all ranks), and none (a backend without a cache).

A run is an alarm when it ends with another exit code than 0, or not in time; with the sentinel also when a verdict was
written, a sentinel has a finding or stopped watching, a rank left no result, or ranks of one tensor-parallel group
compiled another number of times without the program saying so. Exit 1 on any alarm.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpcompile.evidence.rundir import RunDir
from tpcompile.process_tree import run_tree

ROOT = Path(__file__).resolve().parents[3]
STATES = ("cold", "warm", "split")
PER_RANK = (
    'export PYTHONHASHSEED=$((SEED + RANK)) TORCHINDUCTOR_CACHE_DIR="$CACHES/${SHARED_CACHE:-$RANK}"; exec "$0" "$@"'
)
"""Shell in front of each rank: before Python starts, its hash seed and its cache."""
Row = dict[str, Any]


def prepare(state: str, caches: Path, nproc: int) -> None:
    """Bring the ranks' caches, as the run before left them, into that state."""
    emptied = {"cold": range(nproc), "split": (nproc - 1,), "shared": ("shared",)}.get(state, ())
    for owner in emptied:
        shutil.rmtree(caches / str(owner), ignore_errors=True)


def torchrun(nproc: int, script: Path) -> list[str]:
    """Command that starts the script on so many ranks, each through PER_RANK."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*launcher, "--no-python", "sh", "-c", PER_RANK, sys.executable, str(script)]


def gate_run(number: int, folder: Path, args: argparse.Namespace) -> Row:
    """One run of the gate: exit code of the verdict, 124 at the time limit, and its one line."""
    state, seed = STATES[number % len(STATES)], random.randrange(1 << 31)
    nproc, run_dir = args.nproc or 2, folder / f"run_{number}"
    prepare(state, folder / "caches", nproc)
    gate = ["--preset", args.preset, "--run-dir", str(run_dir), "--quiet-report", *(["--train"] if args.train else [])]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "SEED": str(seed), "CACHES": str(folder / "caches")}
    command = [*torchrun(nproc, ROOT / "repro" / "tp_compile_repro.py"), *gate]
    start = time.perf_counter()
    outcome = run_tree(command, environ=environ, timeout_s=args.timeout_s or 900)
    if outcome.signal:
        raise KeyboardInterrupt  # somebody ends us, not only this run
    wall_s = round(time.perf_counter() - start, 1)
    verdict = RunDir(run_dir).read_verdict()
    if outcome.timed_out:
        code, summary = 124, f"no end after {args.timeout_s or 900:g} s"
    elif verdict is None or (verdict.exit_code == 0 and outcome.exit_code != 0):
        code = outcome.exit_code or 3
        summary = f"torchrun ended with {outcome.exit_code}, verdict {verdict and verdict.summary}"
    else:
        code, summary = verdict.exit_code, verdict.summary
    return {"cache": state, "seed": seed, "exit_code": code, "wall_s": wall_s, "summary": summary}


def chosen(args: argparse.Namespace) -> Callable[[int, Path, argparse.Namespace], Row]:
    """What makes one run."""
    if args.what == "gate":
        return gate_run
    from tpcompile.faults.healthy.judge import sentinel_run  # imports torch

    return sentinel_run


def all_runs(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Every run, one line each as it ends."""
    rows: list[Row] = []
    one_run = chosen(args)
    for number in range(args.first, args.first + args.runs):
        row = one_run(number, folder, args)
        rows.append(row)
        what = f"{row['program']:30} {row['backend']:9} " if "program" in row else ""
        line = f"{what}{row['cache']:6} seed {row['seed']:<10} exit {row['exit_code']} {row['wall_s']:6.1f} s"
        print(f"{number + 1:3}/{args.first + args.runs} {line}  {row['summary']}", flush=True)
        if args.json:
            write(args.json, rows, args.device)
    return rows


def write(path: Path, rows: list[Row], device: str) -> dict[str, Any]:
    """Everything so far as JSON: a run of hours that is cut off keeps what it has."""
    alarms = [row for row in rows if row["exit_code"] != 0]
    command = " ".join(["python", *sys.argv])
    result = {"command": command, **versions(device), "runs": len(rows), "false_alarms": len(alarms), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


@functools.cache
def versions(device: str) -> dict[str, str]:
    """What the numbers were measured on."""
    code = "import torch; print(torch.__version__)"
    if device == "cuda":
        code += "; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split("\n")
    machine = f"{platform.machine()}, {os.cpu_count()} cores" + "".join(f", {line}" for line in found[1:] if line)
    return {"machine": machine, "python": platform.python_version(), "torch": found[0]}


def merge(paths: list[Path], out: Path | None) -> list[Row]:
    """The rows of several files as one file, with what they were made on; refuses to mix machines or versions."""
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise SystemExit(f"not merged: {', '.join(missing)} is not there; did its part end?")
    found = [json.loads(path.read_text()) for path in paths]
    made = [{key: one[key] for key in ("machine", "python", "torch")} for one in found]
    if any(one != made[0] for one in made):
        raise SystemExit(f"not merged: made on {made}")
    rows = [row for one in found for row in one["rows"]]
    commands = {re.sub(r"\S+\.json|\b\d+(?=/\d+\b)", "*", one["command"]) for one in found}
    counts = {"runs": len(rows), "false_alarms": sum(row["exit_code"] != 0 for row in rows)}
    if out is not None:
        head = {"command": f"{len(found)} beside each other: {' | '.join(sorted(commands))}"} | made[0] | counts
        out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return rows


def part(text: str) -> tuple[int, int]:
    """`2/3` -> (2, 3)."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(number), int(of)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["gate", "sentinel"], default="gate")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on with a rotation")
    parser.add_argument("--nproc", type=int, default=0, help="ranks; default: 2 for the gate, drawn for the sentinel")
    parser.add_argument("--preset", default="cpu_smoke", help="of the gate")
    parser.add_argument("--train", action="store_true", help="the gate with a backward pass")
    parser.add_argument("--programs", nargs="+", default=[], metavar="NAME", help="some programs only, any of --list")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for the sentinel")
    parser.add_argument("--seed", type=int, default=0, help="the sentinel's runs are drawn from it")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="every N-th program from the K-th on")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put what --json wrote into one file")
    parser.add_argument("--keep", type=Path, help="where to keep caches, and logs of alarms; default: nowhere")
    parser.add_argument("--timeout-s", type=float, default=0, help="for one run; default: 900 gate, 180 sentinel")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    return parser.parse_args()


def main() -> int:
    """Run, count alarms, print the summary."""
    args = options()
    with tempfile.TemporaryDirectory() as folder:
        rows = merge(args.merge, args.json) if args.merge else all_runs(args.keep or Path(folder), args)
    alarms = [row for row in rows if row["exit_code"] != 0]
    result = {"runs": len(rows), "false_alarms": len(alarms)} | ({} if args.merge else versions(args.device))
    print(json.dumps({key: value for key, value in result.items() if key != "rows"} | {"alarms": alarms}, indent=1))
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
