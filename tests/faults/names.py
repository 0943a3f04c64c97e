"""Names that a rank and the judge share; torch-free."""

from __future__ import annotations

from enum import StrEnum


class Route(StrEnum):
    """A way to ask the tool about a program."""

    SENTINEL = "sentinel"
    """While it runs, under the policy `stop`."""
    DIAGNOSE = "diagnose"
    """Afterwards, from TORCH_TRACE of a run without the tool."""
    CHECK_RANKS = "check_ranks"
    """In the program, after its steps."""


RUN = "run"
"""Run directory of the sentinel, below the folder of a case."""
CHECKED = "checked.json"
"""What check_ranks returned."""
DIAGNOSED = "diagnosed.json"
"""What `tpcompile diagnose --json` wrote."""
REACHED = "reached_{rank}.json"
"""When the fault first acted on a rank."""
ENDED = "ended.json"
"""How the ranks ended."""
TRACE = "trace"
"""TORCH_TRACE of the ranks."""
AFTER = "after.json"
"""Exit code of what ran when the ranks had ended."""
