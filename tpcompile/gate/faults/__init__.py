"""Faults that `--fault NAME` injects, to see the gate fail; also the negative controls of the tests.

fault.py          the hooks that the gate calls, and the registry of faults
program.py        the user's program: prints, rank branches and constants, custom ops
kernels.py        fused kernels: for one GPU, undeclared, hidden, edited, different on one rank
triton_kernel.py  the Triton kernels of these faults, imported only when they are used
fast_path.py      fast paths that are wrong on shards, imported only when used: a declaration is for the whole process
calls.py          how attention calls its fast path: under no_grad, other rotary tables, other statistics
collectives.py    how collectives are issued: a different reduce op, dropped result, double copy, local norm
process.py        the process itself: killed, never arrives, does not compile, other profile or sums
"""

from __future__ import annotations

from tpcompile.errors import ConfigError
from tpcompile.gate.faults import calls, collectives, kernels, process, program
from tpcompile.gate.faults.fault import ALL, Fault, FaultContext

NO_FAULT = Fault(name="", what="no fault")


def find(name: str) -> Fault:
    """The fault of that name, `NO_FAULT` for an empty one. Raises ConfigError for an unknown name."""
    if name and name not in ALL:
        raise ConfigError(f"unknown fault {name!r}; choose from {', '.join(sorted(ALL))}")
    return ALL[name] if name else NO_FAULT


__all__ = ["ALL", "NO_FAULT", "Fault", "FaultContext", "calls", "collectives", "find", "kernels", "process", "program"]
