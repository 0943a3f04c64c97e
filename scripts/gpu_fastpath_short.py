"""Checks of the fast paths on one GPU, in about two minutes: each part is a process with a time limit.

    OUT=DIR python scripts/gpu_fastpath_short.py [--dry]

1. `single`: the kernel for one GPU against float64, and its time against Inductor's code at tp 1 of Wan-14B.
2. `killed`: two processes exchange on one GPU, and one of them is killed: the other must end, and name it.
3. `large`: outputs of more than 2^31 elements of every fast path, compared in some rows, among them the last.

Writes PART.json after each step of a part, and prints one table last. Without OUT, DIR is a new temporary folder.
--dry: tiny sizes in Triton's interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="gpu_fastpath_short-"))
DRY = "--dry" in sys.argv
LIMITS_S = dict.fromkeys(("single", "killed", "large"), 300) if DRY else {"single": 65, "killed": 35, "large": 35}
"""In the order of what they are worth."""


def main() -> int:
    """Run the parts one after the other."""
    OUT.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    for part, limit_s in LIMITS_S.items():
        (OUT / f"{part}.json").unlink(missing_ok=True)
        code = run(part, limit_s)
        print(f"{part}: exit code {code}, {time.monotonic() - started:.0f} s since the start", flush=True)
    print("\n".join(table()), flush=True)
    return 0


def run(part: str, limit_s: int) -> int:
    """Exit code of a part; 137 when it was killed."""
    paths = [str(SCRIPTS.parent), str(SCRIPTS), os.environ.get("PYTHONPATH", "")]
    environ = {
        **os.environ,
        "OUT": str(OUT),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TORCHINDUCTOR_CACHE_DIR": str(OUT / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    }
    flags = ["--dry"] if DRY else []
    program = str(SCRIPTS / "fastpath_short" / f"{part}.py")
    command = ["timeout", "-s", "KILL", str(limit_s), sys.executable, program, *flags]
    with open(OUT / f"{part}.log", "w") as log:
        return subprocess.run(command, env=environ, stdout=log, stderr=subprocess.STDOUT, check=False).returncode


def table() -> Iterator[str]:
    """One line for each step of each part; the end of the log of a part without any."""
    for part in LIMITS_S:
        file = OUT / f"{part}.json"
        if not file.exists():
            yield f"{part}: nothing; {(OUT / f'{part}.log').read_text()[-600:]}"
            continue
        for name, found in json.loads(file.read_text()).items():
            shown = ", ".join(f"{key} {value}" for key, value in found.items() if key != "cell")
            yield f"{part:6} | {name:36} | {shown}"


if __name__ == "__main__":
    sys.exit(main())
