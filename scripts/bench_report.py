"""How long `tpcompile report` takes for a run of many ranks, made of the records of a small one.

    tpcompile gate --fault get_rank_constant --run-dir runs/two
    python scripts/bench_report.py runs/two --ranks 8 1024 --json results/bench_report_cpu.json

One rank of three hundred has the record of rank 1, the others that of rank 0; each has its own number, measured values
and hashes of removed text, as ranks of a real run have. Seconds of the whole command, and of its CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def replicate(run: Path, out: Path, size: int) -> int:
    """Write a run directory of that many ranks; returns its bytes."""
    records = [json.loads((run / f"rank_{rank}" / "record.json").read_text()) for rank in (0, 1)]
    manifest = run / "rank_0" / "manifest.json"
    odd = {rank for rank in range(size) if rank % 300 == 1}
    for rank in range(size):
        record = records[rank in odd]
        record |= {"rank": rank, "world_size": size, "coordinate": rank, "places": {"local rank": rank % 8}}
        record["facts"] = {**record["facts"], "number": rank}
        for compile_ in record["compiles"]:
            for removed in compile_["normalised"]:
                removed["sha256"] = f"{rank:064x}"
        folder = out / f"rank_{rank}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps(record, sort_keys=True))
        if manifest.exists():
            (folder / "manifest.json").write_text(manifest.read_text())
    verdict = json.loads((run / "verdict.json").read_text())
    others = [rank for rank in range(size) if rank not in odd]
    verdict |= {"world_size": size, "domains": {"tp": [others, sorted(odd)]}}
    for found in verdict["divergences"]:
        found["groups"][0]["ranks"], found["groups"][1]["ranks"] = others, sorted(odd)
    (out / "verdict.json").write_text(json.dumps(verdict))
    (out / "run.json").write_text((run / "run.json").read_text())
    return sum(path.stat().st_size for path in out.rglob("*.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            num_bytes = replicate(arguments.run, Path(folder) / "run", size)
            page = Path(folder) / "page.html"
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            began = time.perf_counter()
            command = [sys.executable, "-m", "tpcompile", "report", str(Path(folder) / "run"), "--html", str(page)]
            subprocess.run(command, check=True, capture_output=True)
            wall = time.perf_counter() - began
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            row = {
                "ranks": size, "run_bytes": num_bytes, "page_bytes": page.stat().st_size,
                "wall_s": round(wall, 2), "cpu_s": round(cpu, 2), "largest_process_kib": after.ru_maxrss,
            }  # fmt: skip
        rows.append(row)
        print(row, flush=True)
    if arguments.json:
        found = {
            "command": "python " + " ".join(sys.argv), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(), "rows": rows,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
