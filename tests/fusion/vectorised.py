"""`python -m tests.fusion.vectorised REQUEST`: tpcompile.fusion.win.measure, with vectors in kernels, as users have.

tests/preloaded.py leaves them out, and here kernels are timed.
"""

from __future__ import annotations

import runpy

import torch._inductor.config

if __name__ == "__main__":
    torch._inductor.config.cpp.simdlen = None
    runpy.run_module("tpcompile.fusion.win.measure", run_name="__main__", alter_sys=True)
