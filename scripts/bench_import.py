"""What importing the package costs beyond torch: CPU seconds of processes that import and end, interleaved rounds.

    python scripts/bench_import.py --rounds 9 --json results/import_cpu.json

`torch._dynamo` is what a program imports that compiles anything. The ratio of a round is that of its own two processes;
each starts an interpreter, and none compiles bytecode.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = {
    "torch": "import torch",
    "torch._dynamo": "import torch, torch._dynamo",
    "tpcompile": "import torch, tpcompile",
    "tpcompile.sentinel": "import torch, tpcompile.sentinel",
    "tpcompile.collectives": "import torch, tpcompile.collectives",
}


def cpu_s(code: str) -> float:
    """CPU seconds, user and system, of a process that runs the code and leaves without taking anything apart."""
    before = os.times()
    command = [sys.executable, "-c", f"{code}; import os; os._exit(0)"]
    subprocess.run(command, cwd=ROOT, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    for code in IMPORTS.values():
        cpu_s(code)  # bytecode, and the files in memory
    rounds = [{name: cpu_s(code) for name, code in IMPORTS.items()} for _ in range(arguments.rounds)]
    report: dict[str, Any] = {
        "command": "python scripts/bench_import.py " + " ".join(sys.argv[1:]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rounds": rounds,
        "imports": {
            name: {
                "cpu_s": round(statistics.median(one[name] for one in rounds), 3),
                "ratio": round(statistics.median(one[name] / one["torch"] for one in rounds), 3),
            }
            for name in IMPORTS
        },
    }
    print(json.dumps(report["imports"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
