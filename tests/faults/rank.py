"""One rank of one case: `python -m tests.faults.rank MODULE CASE --run-dir DIR [OPTIONS]` under torchrun."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path

from tests.faults import backends, context
from tests.faults.case import CASES
from tests.faults.healthy.program import Draw, Program, play


def main() -> None:
    """Play the case on this rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="the module that declares the case")
    parser.add_argument("case")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--bare", action="store_true", help="without the sentinel")
    parser.add_argument("--backend", default="aot_eager", help="backend of programs that do not need a certain one")
    parser.add_argument("--spmd-check", action="store_true", help="switch Inductor's own check on")
    parser.add_argument("--draw", help="parameters of a healthy program, as JSON")
    arguments = parser.parse_args()
    importlib.import_module(arguments.module)
    case, rank = CASES.find(arguments.case), int(os.environ["RANK"])
    if arguments.spmd_check:
        backends.switch_on_spmd_check()
    if isinstance(case, Program):
        play(case, Draw(**json.loads(arguments.draw)), rank=rank, run_dir=arguments.run_dir)
        return
    context.play(case, rank=rank, run_dir=arguments.run_dir, is_watched=not arguments.bare, backend=arguments.backend)


if __name__ == "__main__":
    main()
