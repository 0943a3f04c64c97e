"""What a dry run costs: seconds of CPU and of the wall, and memory, of the command as it is used.

    python scripts/bench_dryrun.py --mesh dp=128,tp=8 --size 8b --json results/dryrun_cpu.json
    python scripts/bench_dryrun.py --mesh dp=8,tp=8 --faults layer,order --odd 37 --json results/dryrun_cpu.json

The program is tests/dryrun/llama.py: two layers unless told otherwise, in a program that reads its rank as training
scripts do. Memory is the sum of what the command and its ranks hold (PSS), the largest of those seen every two seconds.
CPU is that of the command and all of its ranks; on idle cores the wall is at least that divided by their number.
`import_s` is what a process takes to import the command, torch included; the run has it too.
Rows are added to those that the file has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tpcompile.evidence.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]
TARGET = "tests.dryrun.llama:build"
_SAMPLE_S = 2.0  # looking takes 30 ms of a core
_IMPORTS = "import os, tpcompile.dryrun.__main__; os._exit(0)"  # it ends as the command does


def pss_mb(process: psutil.Process) -> float:
    """Memory of a process and all that it started; pages that several share are counted once."""
    total = 0
    try:
        alive = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for one in alive:
        try:
            total += one.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):  # it has ended
            continue
    return total / 2**20


def measure(arguments: argparse.Namespace, fault: str) -> dict[str, Any]:
    """One dry run."""
    settings = [f"size={arguments.size}", f"layers={arguments.layers}"]
    if fault:
        settings += [f"fault={fault}", f"odd={arguments.odd}"]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [
            sys.executable,
            "-m",
            "tpcompile.dryrun",
            TARGET,
            "--mesh",
            arguments.mesh,
            "--run-dir",
            str(run_dir),
        ]
        for setting in settings:
            command += ["--set", setting]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", _IMPORTS], cwd=ROOT, env=environment, check=True)
        import_s = time.monotonic() - began_s
        began_s, before = time.monotonic(), os.times()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )
        watched, most_mb = psutil.Process(process.pid), 0.0
        while process.returncode is None:
            most_mb = max(most_mb, pss_mb(watched))
            with suppress(subprocess.TimeoutExpired):
                process.wait(_SAMPLE_S)
        wall_s, after = time.monotonic() - began_s, os.times()
        return {
            "mesh": arguments.mesh,
            "size": arguments.size,
            "layers": arguments.layers,
            "fault": fault,
            "odd": arguments.odd if fault else None,
            "exit_code": process.returncode,
            "cpu_s": round(sum(after[2:4]) - sum(before[2:4]), 1),
            "cores": len(os.sched_getaffinity(0)),
            "wall_s": round(wall_s, 1),
            "import_s": round(import_s, 1),
            "load": round(os.getloadavg()[0], 1),
            "peak_pss_mb": round(most_mb),
            **found(run_dir),
        }


def found(run_dir: Path) -> dict[str, Any]:
    """What the verdict says."""
    verdict = RunDir(run_dir).read_verdict()
    if verdict is None:
        return {"ranks": None}
    lead = verdict.lead
    line = lead.line if lead is not None else None
    return {
        "world_size": verdict.world_size,
        "summary": verdict.summary.replace(f"{ROOT}/", ""),
        "ranks": list(lead.ranks) if lead is not None else [],
        "line": f"{Path(line.file).name}:{line.line}" if line is not None else "",
        "code": line.code if line is not None else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="dp=128,tp=8")
    parser.add_argument("--size", default="8b", help="small, 8b or 70b: widths of the model")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--faults", default="", help="of the rank --odd, one run each; default: one run without")
    parser.add_argument("--odd", type=int, default=37)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for fault in arguments.faults.split(","):
        row = {"command": "python scripts/bench_dryrun.py " + " ".join(sys.argv[1:]), **measure(arguments, fault)}
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.json:
            write(arguments.json, row)
    return 0


def write(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file; one of the same run replaces it."""
    same = ("mesh", "size", "layers", "fault", "odd")
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [one for one in old if [one[name] for name in same] != [row[name] for name in same]]
    report = {
        "command": "python scripts/bench_dryrun.py, with the arguments of each row",
        "machine": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": [*kept, row],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
