"""A machine without tables measures its sums by size itself: on 2 GPUs, in about six minutes, each part with a limit.

    OUT=DIR python scripts/gpu_tune.py [--only PART ...] [--dry]

setup-1   a job starts with no table and an empty cache: seconds that it measures, what it uses, whether it sums right
setup-2   the same again: what is kept costs nothing
tune      `tpcompile tune --anew`: a second measurement, with the times by size
bench     4 layers of Wan-14B at 8, 256 and 4680 tokens, in one run: mode C with NCCL, with the rows that were measured
          here, and with those that were committed for 2 H100

Writes PART.log and PART.json to DIR, by default a new temporary folder, and one table last. Exit status 0 when every
part ran, all ranks had the same rows, sums and outputs were right, and no ratio is below 0.98.
--dry: the parts on CPU, with times that nobody measured and a tiny block.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu_tune-")).resolve()
LIMITS_S = {"setup-1": 150, "setup-2": 90, "tune": 120, "bench": 540}
PRESETS = ("wan14b_8", "wan14b_256", "wan14b")
COMMITTED = "scripts/tune/committed.py:build"
LEAST_RATIO = 0.98
ENVIRONMENT = 4
"""Exit status of a command that needs GPUs."""


def command_of(part: str, *, dry: bool) -> list[str]:
    """What runs a part."""
    json_file = str(OUT / f"{part}.json")
    if part.startswith("setup"):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        flags = ["--dry"] if dry else []
        return [*launcher, "scripts/tune/setup.py", json_file, *flags]
    if part == "tune":
        table = str(OUT / "table.json")
        return ["-m", "tpcompile", "tune", "--nproc", "2", "--anew", "--json", json_file, "--write", table]
    presets = ("cpu_smoke",) if dry else PRESETS
    size = ["--device", "cpu", "--rounds", "2"] if dry else ["--layers", "4", "--rounds", "20"]
    found = ["-m", "tpcompile", "bench", "--nproc", "2", *size, "--json", json_file, "--logs", str(OUT / "bench-logs")]
    for name in programs(dry=dry):
        found += ["--program", name]
    for preset in presets:
        found += ["--preset", preset]
    return found


def programs(*, dry: bool) -> tuple[str, str, str]:
    """NCCL, measured here, committed; `by-size` needs GPUs."""
    return ("C", "eager", COMMITTED) if dry else ("C:graphed", "C:by-size:graphed", f"{COMMITTED}:graphed")


def run(part: str, environ: dict[str, str], *, dry: bool) -> int:
    """Exit status of a part; 137 when it was killed."""
    command = ["timeout", "-s", "KILL", str(LIMITS_S[part]), sys.executable, *command_of(part, dry=dry)]
    with open(OUT / f"{part}.log", "w") as log:
        return subprocess.run(
            command, env=environ, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode  # fmt: skip


def environment(cache: str) -> dict[str, str]:
    """Of all parts: no table that ships, and a cache of their own."""
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "TPCOMPILE_NO_SHIPPED_TABLES": "1",
        "XDG_CACHE_HOME": cache,
    }


def of_setup(found: dict[str, Any]) -> Iterator[str]:
    for rank, one in enumerate(found["ranks"]):
        yield f"rank {rank}: {one['seconds']} s, keeps {one.get('mib_kept', 0)} MiB, wrong {one.get('wrong_sizes', [])}"
        yield f"        {one['text']}"


def of_tune(found: dict[str, Any]) -> Iterator[str]:
    yield f"pushed from {found['push_from_bytes']}, rows {found['rows']}"
    for one in (*found["measured"], *found["in_flight"]):
        yield f"{one['size_bytes']:>10} {one['us']}"


def of_bench(found: dict[str, Any], *, dry: bool) -> Iterator[str]:
    """Each ratio is the median of those of the rounds: above 1 the rows that were measured here are faster."""
    for measured in found["measured"]:
        rows = {row["name"]: row for row in measured["rows"]}
        nccl, here, committed = (rows[name] for name in programs(dry=dry))
        for row in (nccl, here, committed):
            middle = f"{statistics.median(row['rounds_ms']):.3f} ms" if row["rounds_ms"] else row["why_not"]
            yield f"{measured['tokens']:>5} tokens  {row['name'][-32:]:32} {middle}, error {row['error_ratio']}"
        ratios = f"NCCL / here {ratio(nccl, here)}, committed / here {ratio(committed, here)}"
        yield f"{measured['tokens']:>5} tokens  {ratios}"


def ratio(above: dict[str, Any], below: dict[str, Any]) -> float:
    """Of what is timed in turn; 0 where one was not."""
    rounds = zip(above["rounds_ms"], below["rounds_ms"], strict=False)
    return round(statistics.median([ms / other_ms for ms, other_ms in rounds] or [0.0]), 4)


def problems(part: str, code: int, found: dict[str, Any] | None, *, dry: bool) -> list[str]:
    """What is not as it should be."""
    if dry and part == "tune":
        return [] if code == ENVIRONMENT else [f"ends with {code} where there are no GPUs"]
    wrong = [f"ends with {code}"] if code else []
    if found is None:
        return [*wrong, "wrote nothing"]
    if part.startswith("setup") and not found["is_ok"]:
        wrong.append("ranks differ, or sums are wrong")
    for measured in found.get("measured", []) if part == "bench" else []:
        nccl, here, committed = ({row["name"]: row for row in measured["rows"]}[name] for name in programs(dry=dry))
        are_slow = not dry and min(ratio(nccl, here), ratio(committed, here)) < LEAST_RATIO
        wrong += [f"{measured['tokens']} tokens: slower than it could be"] if are_slow else []
        for row in (nccl, here, committed):
            is_right = row["error_ratio"] is not None and row["error_ratio"] <= measured["error_limit"]
            wrong += [] if is_right else [f"{row['name']} differs"]
    return wrong


def table(codes: dict[str, int], *, dry: bool) -> Iterator[str]:
    """The figures of each part, and what is wrong; the end of the log of one that failed."""
    show = {"setup-1": of_setup, "setup-2": of_setup, "tune": of_tune}
    for part, code in codes.items():
        file = OUT / f"{part}.json"
        found = json.loads(file.read_text()) if file.exists() else None
        wrong = problems(part, code, found, dry=dry)
        if wrong:
            log = (OUT / f"{part}.log").read_text()
            yield f"=== the log of {part}\n{log[-3000:]}"
        if found is not None:
            lines = of_bench(found, dry=dry) if part == "bench" else show[part](found)
            yield from (f"{part:8} {line}" for line in lines)
        yield f"{'BAD' if wrong else 'ok '} {part}: {'; '.join(wrong)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(LIMITS_S), help="repeatable")
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    codes, began_s = {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_tune-cache-") as cache:  # only this user can write to it
        for part in given.only or LIMITS_S:
            codes[part] = run(part, environment(cache), dry=given.dry)
            print(f"{part}: {codes[part]}, {time.monotonic() - began_s:.0f} s since the start", flush=True)
        shutil.copytree(Path(cache, "tpcompile"), OUT / "cache", dirs_exist_ok=True)
    lines = list(table(codes, dry=given.dry))
    print("\n".join(lines), flush=True)
    return int(any(line.startswith("BAD") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
