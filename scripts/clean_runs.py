"""How often the gate cries wolf: N runs of a correct block, each must be green.

    python scripts/clean_runs.py --runs 20 --nproc 2 --preset cpu_smoke [--train] [--json FILE]

Every process gets a PYTHONHASHSEED of its own, and every rank its own Inductor cache. Runs cycle through three
states of these caches: cold (all empty), warm (all filled by the run before), split (filled, but for the last rank's).
Exit 1 on any alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tpcompile.evidence.rundir import RunDir
from tpcompile.process_tree import run_tree

ROOT = Path(__file__).resolve().parent.parent
STATES = ("cold", "warm", "split")
PER_RANK = 'export PYTHONHASHSEED=$((SEED + RANK)) TORCHINDUCTOR_CACHE_DIR="$CACHES/$RANK"; exec "$0" "$@"'
"""Shell in front of each rank: before Python starts, its hash seed and its cache."""


def prepare(state: str, caches: Path, nproc: int) -> None:
    """Bring the ranks' caches, as the run before left them, into that state."""
    for rank in {"cold": range(nproc), "warm": (), "split": (nproc - 1,)}[state]:
        shutil.rmtree(caches / str(rank), ignore_errors=True)


def one_run(run_dir: Path, caches: Path, seed: int, args: argparse.Namespace) -> tuple[int, str]:
    """Exit code of the verdict, 124 at the time limit, and its one line."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc)]
    rank = ["--no-python", "sh", "-c", PER_RANK, sys.executable, str(ROOT / "repro" / "tp_compile_repro.py")]
    gate = ["--preset", args.preset, "--run-dir", str(run_dir), "--quiet-report", *(["--train"] if args.train else [])]
    environ = {"OMP_NUM_THREADS": "1", **os.environ, "SEED": str(seed), "CACHES": str(caches)}
    outcome = run_tree([*torchrun, *rank, *gate], environ=environ, timeout_s=args.timeout_s)
    verdict = RunDir(run_dir).read_verdict()
    if outcome.timed_out:
        return 124, f"no end after {args.timeout_s:g} s"
    if verdict is None or (verdict.exit_code == 0 and outcome.exit_code != 0):
        return outcome.exit_code or 3, f"torchrun ended with {outcome.exit_code}, verdict {verdict and verdict.summary}"
    return verdict.exit_code, verdict.summary


def all_runs(folder: Path, args: argparse.Namespace) -> list[dict[str, object]]:
    """Every run, one line each as it ends."""
    rows: list[dict[str, object]] = []
    for number in range(args.runs):
        state, seed = STATES[number % len(STATES)], random.randrange(1 << 31)
        prepare(state, folder / "caches", args.nproc)
        start = time.perf_counter()
        code, summary = one_run(folder / f"run_{number}", folder / "caches", seed, args)
        seconds = round(time.perf_counter() - start, 1)
        rows.append({"cache": state, "seed": seed, "exit_code": code, "wall_s": seconds, "summary": summary})
        print(
            f"{number + 1:3}/{args.runs} {state:5} seed {seed:<10} exit {code} {seconds:6.1f} s  {summary}", flush=True
        )
    return rows


def versions() -> dict[str, str]:
    """What the numbers were measured on."""
    found = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    return {"machine": machine, "python": platform.python_version(), "torch": found.stdout.strip()}


def main() -> int:
    """Run, count alarms, print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--timeout-s", type=float, default=900, help="for one run")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = all_runs(Path(folder), args)
    alarms = [row for row in rows if row["exit_code"] != 0]
    command = " ".join(["python", *sys.argv])
    result = {"command": command, **versions(), "runs": len(rows), "false_alarms": len(alarms), "rows": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"} | {"alarms": alarms}, indent=1))
    return int(bool(alarms))


if __name__ == "__main__":
    sys.exit(main())
