"""A torchrun target: the gate, each rank with an Inductor cache of its own.

torchrun ... tests/gate/own_cache.py CACHES ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.gate.runs import REPRO

if __name__ == "__main__":
    caches = Path(sys.argv[1])
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches / os.environ["RANK"])
    sys.argv = [str(REPRO), *sys.argv[2:]]
    runpy.run_path(str(REPRO), run_name="__main__")
