"""Execution profiles on 1 or 2 GPUs, in about four minutes: each part is a job of its own with a time limit.

    python scripts/gpu_profiles.py --nproc 2 --json profiles.json [--only values-wan14b_8]

values-PRESET    replays equal compiled calls bit for bit, new shapes are captured, 10,000 replays do not grow
decode           generate with a replayed step: tokens of the eager model, and tokens per second
end-HOW          a job with live graphs ends: by destroy_process_group, by its last line, by close; with a sentinel too
killed-WHEN      a rank is killed in a capture or a replay: the job ends, and the sentinel names it
differs-WHAT     a rank with a different profile or signature is named, with both values
gate-HOW         the gate of mode C with --profile graphed, forward, training and with a fault in the profile; and with
                 --profile max-autotune

Parts run side by side. Prints a short table last; the log of a part that fails is printed whole before it, and is in
the JSON. Exit status 0 when all parts are as they should be.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VALUES, ENDS = "scripts/profiles/values.py", "scripts/profiles/ends.py"
REPRO = "repro/tp_compile_repro.py"
SIDE_BY_SIDE = 6
KILLED = 137
"""Exit status of `timeout -s KILL`: the part hung."""


@dataclass(frozen=True)
class Part:
    """One job."""

    program: str
    arguments: tuple[str, ...]
    limit_s: int
    exit_code: int = 0
    says: tuple[str, ...] = ()
    """Texts that its output must have."""
    needs: int = 1
    """Ranks."""
    options: dict[str, str] = field(default_factory=dict)


def parts(out: Path) -> dict[str, Part]:
    """Name -> job, the longest first."""
    found = {}
    gate = ("--device", "cuda", "--preset", "wan14b_8", "--profile", "graphed")
    for preset, replays in (("wan14b_8", 10_000), ("llama8b", 2_000)):
        arguments = (preset, str(replays), str(out / f"values-{preset}.json"))
        found[f"values-{preset}"] = Part(VALUES, arguments, limit_s=200)
    tuned = ("--device", "cuda", "--preset", "wan14b_8", "--layers", "1", "--profile", "max-autotune")
    found["gate-tuned"] = Part(REPRO, (*tuned, "--run-dir", str(out / "gate-tuned")), limit_s=230)
    found["decode"] = Part("scripts/profiles/decode.py", (str(out / "decode.json"),), limit_s=200)
    found["gate-train"] = Part(REPRO, (*gate, "--train", "--run-dir", str(out / "gate-train")), limit_s=200)
    found["gate-forward"] = Part(REPRO, (*gate, "--run-dir", str(out / "gate-forward")), limit_s=200)
    fault = ("--device", "cuda", "--profile", "graphed", "--fault", "other_profile", "--preset", "cpu_smoke")
    found["gate-fault"] = Part(
        REPRO, (*fault, "--run-dir", str(out / "gate-fault")), limit_s=120, exit_code=1, needs=2,
        says=("graphed", "measured", "rank 1"),
    )  # fmt: skip
    for when in ("capture", "replay"):
        found[f"killed-{when}"] = Part(
            ENDS, (f"killed-{when}", "sentinel"), limit_s=60, exit_code=1, says=("rank 1",), needs=2
        )
    for what, values in (("profile", ("graphed", "default")), ("signature", ("[8, 64]", "[9, 64]"))):
        found[f"differs-{what}"] = Part(
            ENDS, (f"differs-{what}",), limit_s=60, exit_code=1, says=("different", "rank 1", *values), needs=2
        )
    for how in ("destroy", "exit", "close"):
        for watched in ("", "sentinel"):
            name = f"end-{how}-{watched}".rstrip("-")
            found[name] = Part(ENDS, (how, *filter(None, [watched])), limit_s=60)
    return found


def run(name: str, part: Part, nproc: int, out: Path) -> dict[str, Any]:
    """What became of a part."""
    command = [
        "timeout", "-s", "KILL", str(part.limit_s), sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", str(nproc), str(ROOT / part.program), *part.arguments,
    ]  # fmt: skip
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "4",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PYTHONUNBUFFERED": "1",
    }
    started = time.monotonic()
    done = subprocess.run(
        command, env=environ, cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        check=False,
    )  # fmt: skip
    missing = [text for text in part.says if text not in done.stdout]
    found: dict[str, Any] = {
        "ok": done.returncode == part.exit_code and not missing,
        "exit": done.returncode,
        "seconds": round(time.monotonic() - started, 1),
    }
    if done.returncode == KILLED:
        found["problem"] = f"did not end within {part.limit_s} s"
    elif missing:
        found["problem"] = f"does not say {missing}"
    elif not found["ok"]:
        found["problem"] = f"ends with {done.returncode}, not {part.exit_code}"
    measured = out / f"{name}.json"
    if measured.exists():
        found["measured"] = json.loads(measured.read_text())
    if not found["ok"]:
        found["log"] = done.stdout[-20_000:]
    print(f"{name}: {'ok' if found['ok'] else found['problem']}, {found['seconds']} s", flush=True)
    return found


def main() -> int:
    """Run all parts that fit the number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--only", action="append", default=[], help="begin of a part's name; repeatable")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        every = {name: part for name, part in parts(out).items() if part.needs <= options.nproc}
        chosen = {n: part for n, part in every.items() if not options.only or n.startswith(tuple(options.only))}
        found = side_by_side({n: lambda n=n, p=p: run(n, p, options.nproc, out) for n, p in chosen.items()})
    result = {"command": f"python scripts/gpu_profiles.py --nproc {options.nproc}", **machine(), "parts": found}
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    for name, one in found.items():
        if not one["ok"]:
            print(f"=== {name}: {one['problem']}\n{one['log']}\n", flush=True)
    for name, one in found.items():
        print(f"{'ok ' if one['ok'] else 'BAD'} {name:22} {one['seconds']:6.1f} s  {one.get('problem', '')}")
    return 0 if all(one["ok"] for one in found.values()) else 1


def side_by_side(jobs: dict[str, Callable[[], dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The results by name, in order."""
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        running = {name: pool.submit(job) for name, job in jobs.items()}
        return {name: one.result() for name, one in running.items()}


def machine() -> dict[str, str]:
    """What it ran on."""
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if has_gpu else "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_gpu else "",
    }


if __name__ == "__main__":
    sys.exit(main())
