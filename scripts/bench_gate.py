"""What the gate costs: whole-process wall time of mode C over that of a bare script, in interleaved rounds.

    python scripts/bench_gate.py --nproc 2 --preset cpu_smoke --rounds 5 [--cold] [--json FILE]

Warm: both share one filled Inductor cache. --cold: every process starts with an empty one.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def torchrun(script: str, nproc: int, arguments: list[str], cache: str) -> float:
    """Wall seconds of one torchrun; raises when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), script]
    environ = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    subprocess.run(command + arguments, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Interleave bare and gate, print medians and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--preset", default="cpu_smoke")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    extra = ["--preset", args.preset, *(["--train"] if args.train else [])]
    seconds: dict[str, list[float]] = {"bare": [], "gate": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(-1, args.rounds):  # round -1 fills caches and is not counted
            for name in ("bare", "gate") if number % 2 else ("gate", "bare"):
                cache = f"{folder}/cache-{name}-{number}" if args.cold else f"{folder}/cache"
                script = "scripts/bare_block.py" if name == "bare" else "repro/tp_compile_repro.py"
                more = [] if name == "bare" else ["--quiet-report", "--run-dir", f"{folder}/run-{number}"]
                took = torchrun(script, args.nproc, extra + more, cache)
                if number >= 0:
                    seconds[name].append(took)
    ratios = [g / b for g, b in zip(seconds["gate"], seconds["bare"], strict=True)]
    result = {
        "command": " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "bare_s": [round(s, 2) for s in seconds["bare"]],
        "gate_s": [round(s, 2) for s in seconds["gate"]],
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
