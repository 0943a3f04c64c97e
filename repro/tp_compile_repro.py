"""The stop-the-line gate: one TP transformer block, compiled on every rank, in modes A, B and C.

    torchrun --standalone --nproc-per-node 8 repro/tp_compile_repro.py --mode C

Exit status under torchrun is 0 or 1; `tpcompile gate` and RUN/verdict.json keep the full code.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from tpcompile import gate, logs
from tpcompile.errors import ConfigError
from tpcompile.request import RunRequest, add_flags


def main() -> int:
    """Run the gate on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, RunRequest)
    parser.add_argument("--quiet-report", action="store_true", help="Write the verdict, print nothing.")
    options = vars(parser.parse_args())
    quiet = options.pop("quiet_report")
    request = RunRequest(**options)
    logs.setup(rank=int(os.environ.get("RANK", "0")))
    device = request.device
    if device == "auto":
        has_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        device = "cuda" if has_gpus else "cpu"
    try:
        config = request.config(device)
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return gate.run(config, run_dir=request.run_dir, quiet=quiet)


if __name__ == "__main__":
    sys.exit(main())
