"""One rank of one case: `python -m tpcompile.faults.rank CASE --run-dir DIR [OPTIONS]` under torchrun."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tpcompile.faults.cases import find


def main() -> None:
    """Set the rank's environment before torch is imported, then play the case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--bare", action="store_true", help="without the sentinel")
    parser.add_argument("--backend", default="aot_eager", help="backend of programs in which it is not the point")
    parser.add_argument("--spmd-check", action="store_true", help="switch Inductor's own check on")
    arguments = parser.parse_args()
    case, rank = find(arguments.case), int(os.environ["RANK"])
    os.environ.update(case.env.get(rank, {}))

    from tpcompile.faults.context import play
    from tpcompile.torch_api import backends

    if arguments.spmd_check:
        backends.switch_on_spmd_check()
    play(case, rank=rank, run_dir=arguments.run_dir, is_watched=not arguments.bare, backend=arguments.backend)


if __name__ == "__main__":
    main()
