"""SPMD type check: what is replicated, varying or partial, followed through a module in eager on fake ranks.

    report = check_types(lambda comm: TransformerStack(args, comm, num_layers=1), (x, cos, sin), tp=4)
    report.raise_on_violation()

It names the first op that uses a partial value as if it were whole, drops a reduced result, or breaks a gradient, with
its line. A debug mode: off in production, and nothing of it is in a compiled graph. `tpcompile typecheck` checks what
`tpcompile gate --target` runs.

check_types    a function that builds a module -> Report, on fake ranks of this process
check_target   the target of a command -> Report
check_module   a module on a rank of a group, fake or real -> Report
fake_ranks     a group of which only one rank exists
SpmdTypeMode   the mode that follows the types, for code that is no module
"""

from tpcompile.typecheck.check import check_module, check_types, fake_ranks
from tpcompile.typecheck.mode import SpmdTypeMode
from tpcompile.typecheck.report import Report, Violation
from tpcompile.typecheck.site import Site
from tpcompile.typecheck.spmd import SpmdType, parse_type
from tpcompile.typecheck.targets import check_target

__all__ = [
    "Report",
    "Site",
    "SpmdType",
    "SpmdTypeMode",
    "Violation",
    "check_module",
    "check_target",
    "check_types",
    "fake_ranks",
    "parse_type",
]
