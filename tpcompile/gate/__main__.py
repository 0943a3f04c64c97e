"""One rank of a run that `tpcompile gate` launched: RUN_DIR with its config.json -> exit code; prints no report."""

from __future__ import annotations

import os
import sys

from tpcompile import logs
from tpcompile.evidence.rundir import RunDir


def main() -> int:
    """Run this rank, and write what it does meanwhile for those who wait for it to start."""
    rank = int(os.environ.get("RANK", "0"))
    logs.setup(rank=rank)
    run_dir = RunDir(sys.argv[1])
    run_dir.write_start(rank, "imports torch")
    from tpcompile.gate.start import run

    run_dir.write_start(rank, "waits for the other ranks to join")
    return run(run_dir.read_config(), run_dir=run_dir.path, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
