"""The stop-the-line gate: one TP transformer block, compiled on every rank, in modes A, B and C.

    torchrun --standalone --nproc-per-node 8 repro/tp_compile_repro.py --mode C

Exit status under torchrun is 0 or 1; `tpcompile gate` and RUN/verdict.json keep the full code.
"""

from __future__ import annotations

import argparse
import os
import sys

from tpcompile import config, gate, logs
from tpcompile.errors import ConfigError


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cpu_smoke", help=f"one of {', '.join(config.preset_paths())}")
    parser.add_argument("--mode", default="C", choices=["A", "B", "C", "all"], help="how collectives are issued")
    parser.add_argument("--layers", type=int, help="blocks in the compiled stack")
    parser.add_argument("--train", action="store_true", help="forward and backward")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float64"], help="weights and activations")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--run-dir", help="where records and the verdict go; default: a new directory under runs/")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--fault", default="", help="inject a known fault, to see the gate go red")
    parser.add_argument("--fault-rank", type=int, default=-1, help="rank that gets it; -1 is the last")
    parser.add_argument("--quiet-report", action="store_true", help="write the verdict, print nothing")
    return parser.parse_args(argv)


def main() -> int:
    """Run the gate on this rank."""
    args = parse()
    logs.setup(rank=int(os.environ.get("RANK", "0")))
    overrides = list(args.overrides)
    if args.layers is not None:
        overrides.append(f"block.num_layers={args.layers}")
    if args.dtype is not None:
        overrides.append(f"block.dtype={args.dtype}")
    try:
        settings = config.load(
            args.preset,
            overrides,
            modes=config.ALL_MODES if args.mode == "all" else (args.mode,),
            train=args.train,
            device=args.device,
            fault=args.fault,
            fault_rank=args.fault_rank,
        )
    except ConfigError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return gate.run(settings, run_dir=args.run_dir, quiet=args.quiet_report)


if __name__ == "__main__":
    sys.exit(main())
