"""Comparison of tensor-parallel modules with their single-device twins: for the gate, and for users' own tests.

check.py      `check_twin`: a module on the ranks of a group, eager, compiled, in several dtypes -> report
local.py      `check_twin_local`: all ranks in one process and thread, eager
ranks.py      `run_on_ranks`: a function on N gloo ranks of this machine
twin.py       the single-device module in float64 and in the dtype under test, and errors against it
draw.py       weights and inputs from a seed, head-skewed or whole numbers
counting.py   collectives in issue order against the declaration
records.py    the report
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpcompile.testing.check import check_twin
    from tpcompile.testing.local import check_twin_local
    from tpcompile.testing.ranks import run_on_ranks
    from tpcompile.testing.records import TwinReport

__all__ = ["TwinReport", "check_twin", "check_twin_local", "run_on_ranks"]
_HOMES = {"TwinReport": "records", "check_twin": "check", "check_twin_local": "local", "run_on_ranks": "ranks"}


def __getattr__(name: str) -> Any:
    """Import on first use: a spawned rank that needs `run_on_ranks` only does not pay for the rest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
