"""A torchrun target: the gate, each rank with an Inductor cache of its own.

torchrun ... tests/gate/own_cache.py CACHES ARGUMENTS

With HASH_SEED in the environment rank 1 is a new process, with that hash seed.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch._inductor.config

REPRO = Path(__file__).resolve().parents[2] / "repro" / "tp_compile_repro.py"
"""As in runs.py, whose imports would cost the new process a third of a second."""

if __name__ == "__main__":
    seed = os.environ.pop("HASH_SEED", None)
    if seed and os.environ["RANK"] == "1":
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": seed})
    torch._inductor.config.cpp.simdlen = 1  # half the time in the C++ compiler
    caches = Path(sys.argv[1])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / os.environ["RANK"])
    sys.argv = [str(REPRO), *sys.argv[2:]]
    runpy.run_path(str(REPRO), run_name="__main__")
