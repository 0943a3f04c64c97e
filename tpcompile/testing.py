"""What tests of tensor-parallel modules call: `tpcompile.numerics`, and `run_on_ranks` to start ranks for it.

check_numerics         a module on the ranks of a group, eager, compiled, in several dtypes -> report
check_numerics_local   the same with all ranks in one process and thread, eager
run_on_ranks       a function on N gloo ranks of this machine
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpcompile.numerics.check import check_numerics
    from tpcompile.numerics.local import check_numerics_local
    from tpcompile.numerics.numerics_report import NumericsReport
    from tpcompile.ranks.pool import run_on_ranks

__all__ = ["NumericsReport", "check_numerics", "check_numerics_local", "run_on_ranks"]
_HOMES = {
    "NumericsReport": "tpcompile.numerics.numerics_report",
    "check_numerics": "tpcompile.numerics.check",
    "check_numerics_local": "tpcompile.numerics.local",
    "run_on_ranks": "tpcompile.ranks.pool",
}


def __getattr__(name: str) -> Any:
    """Import on first use: a spawned rank that needs `run_on_ranks` only does not pay for the rest."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
