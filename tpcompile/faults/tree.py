"""Command -> exit code and timeout as JSON: `run_tree` in a process of its own, so that many can run side by side.

    python -m tpcompile.faults.tree LIMIT_S OUTCOME_JSON -- COMMAND...

`run_tree` handles signals, which Python allows on a main thread only.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from tpcompile.process_tree import run_tree

GRACE_S = 3.0


def main(arguments: list[str]) -> None:
    """Run the command, write how it ended."""
    limit_s, outcome, separator, *command = arguments
    assert separator == "--", "usage"
    ended = run_tree(command, environ=os.environ, timeout_s=float(limit_s), grace_s=GRACE_S)
    Path(outcome).write_text(json.dumps(asdict(ended)))


if __name__ == "__main__":
    main(sys.argv[1:])
