"""Faults that `--fault NAME` injects, to see the gate fail; also the negative controls of the tests.

program.py        the user's program: prints, rank branches and constants, custom ops
triton_kernel.py  an undeclared Triton kernel, imported only when it is used
collectives.py    how collectives are issued: a different reduce op, dropped result, double copy, local norm
process.py        the process itself: killed, never arrives, does not compile
"""

from __future__ import annotations

from tpcompile.errors import ConfigError
from tpcompile.faults.injected import collectives, process, program
from tpcompile.faults.injected.fault import Fault, FaultContext

ALL: dict[str, Fault] = {fault.name: fault for module in (program, collectives, process) for fault in module.FAULTS}

NO_FAULT = Fault(name="", what="no fault")


def find(name: str) -> Fault:
    """The fault of that name, `NO_FAULT` for an empty one. Raises ConfigError for an unknown name."""
    if not name:
        return NO_FAULT
    if name not in ALL:
        raise ConfigError(f"unknown fault {name!r}; choose from {', '.join(sorted(ALL))}")
    return ALL[name]


__all__ = ["ALL", "NO_FAULT", "Fault", "FaultContext", "find"]
