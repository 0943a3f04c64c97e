"""`python -m tests.fusion.vectorised REQUEST`: fusion.win.measure_mode, with vectors in kernels, as users have.

tests/preloaded.py leaves them out, and here kernels are timed. A program recompiles three times, not eight.
"""

from __future__ import annotations

import runpy

import torch._dynamo.config
import torch._inductor.config

if __name__ == "__main__":
    torch._inductor.config.cpp.simdlen = None
    torch._dynamo.config.recompile_limit = 4
    runpy.run_module("tpcompile.fusion.win.measure_mode", run_name="__main__", alter_sys=True)
