"""Command -> exit code and timeout as JSON: `run_tree` in a process of its own, so that many can run in parallel.

    python -m tests.faults.tree LIMIT_S OUTCOME_JSON -- COMMAND...

`run_tree` handles signals, which Python allows on a main thread only. The tree ends when standard input is closed, so
also when the process that holds the other end of it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path

from tpcompile.process_tree import run_tree

GRACE_S = 3.0


def main(arguments: list[str]) -> None:
    """Run the command, write how it ended."""
    limit_s, outcome, separator, *command = arguments
    assert separator == "--", "usage"
    threading.Thread(target=_end_with_input, daemon=True).start()
    ended = run_tree(command, environ=os.environ, timeout_s=float(limit_s), grace_s=GRACE_S)
    Path(outcome).write_text(json.dumps(asdict(ended)))


def _end_with_input() -> None:
    os.read(0, 1)  # not sys.stdin: its lock would be held when Python ends
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
