"""The stop-the-line gate: one TP transformer block, compiled on every rank, in modes A, B and C.

    torchrun --standalone --nproc-per-node 8 repro/tp_compile_repro.py --mode C

Exit status under torchrun is 0 or 1; `tpcompile gate` and RUN/verdict.json keep the full code.
"""

from __future__ import annotations

import sys

from tpcompile.gate.in_rank import main

if __name__ == "__main__":
    sys.exit(main(__doc__ or ""))
