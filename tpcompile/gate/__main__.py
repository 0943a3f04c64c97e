"""One rank of a run that `tpcompile gate` launched: RUN_DIR with its config.json -> exit code; prints no report."""

from __future__ import annotations

import os
import sys

from tpcompile import logs
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.start import run

if __name__ == "__main__":
    logs.setup(rank=int(os.environ.get("RANK", "0")))
    (run_dir,) = sys.argv[1:]
    sys.exit(run(RunDir(run_dir).read_config(), run_dir=run_dir, quiet=True))
