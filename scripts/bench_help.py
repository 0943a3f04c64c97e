"""Wall time of `tpcompile --help` and what its imports cost: the budget is 0.3 s.

python scripts/bench_help.py
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import time

BUDGET_S = 0.3
REPEATS = 20
COMMAND = [sys.executable, "-m", "tpcompile", "--help"]


def main() -> int:
    """Print median and worst of 20 runs and the five slowest imports; 1 when the median is over budget."""
    subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)  # writes the .pyc files
    times_s = sorted(_timed() for _ in range(REPEATS))
    median_s = statistics.median(times_s)
    print(
        f"tpcompile --help: median {median_s:.3f} s, worst {times_s[-1]:.3f} s of {REPEATS} runs, budget {BUDGET_S} s"
    )
    print(f"python {platform.python_version()}, {platform.machine()}")
    for total_ms, name in _imports()[:5]:
        print(f"{total_ms:8.1f} ms  import {name}")
    return int(median_s > BUDGET_S)


def _timed() -> float:
    start = time.perf_counter()
    subprocess.run(COMMAND, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _imports() -> list[tuple[float, str]]:
    command = [sys.executable, "-X", "importtime", *COMMAND[1:]]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    return sorted(((int(row[1]) / 1000, row[2].strip()) for row in rows[1:]), reverse=True)


if __name__ == "__main__":
    sys.exit(main())
