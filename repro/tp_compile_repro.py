"""The stop-the-line gate: one TP transformer block, compiled on every rank, in modes A, B and C.

    torchrun --standalone --nproc-per-node 8 repro/tp_compile_repro.py --mode C

Exit status under torchrun is 0 or 1; `tpcompile gate` and RUN/verdict.json keep the full code.
"""

from __future__ import annotations

import argparse
import sys

from tpcompile.gate.in_rank import run_in_rank
from tpcompile.request import RunRequest, add_flags


def main() -> int:
    """Run the gate on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, RunRequest)
    parser.add_argument("--quiet-report", action="store_true", help="Write the verdict, print nothing.")
    options = vars(parser.parse_args())
    quiet = options.pop("quiet_report")
    return run_in_rank(RunRequest(**options), quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
