"""What the gate does inside each rank: capture -> digest -> exchange -> verdict.

start.py      arguments, run directory, process group
running.py    the modes or the target, in order
record.py     what this rank has observed so far -> its record
ending.py     records of all ranks -> verdict, reports, exit code; also of a run that ends early, or cannot start
modes.py      what modes A, B and C run, phase by phase
target.py     the user's own program (--target), run phase by phase
on_one_rank.py  the program as build makes it for one rank, beside which its lines are compared
step_values.py  what a step returns and does to parameters, each as a value with a name
outputs.py    what a target returned in its runs -> errors, gradients too
profiled.py   calls of mode C under the profile of the run
phases.py     phases that all ranks begin together; what modes and targets share
in_rank.py    flags of the gate in a rank that torchrun has started
reference.py  errors against a float64 single-device reference
measurements.py          what a rank measured of modes A, B and C; torch-free
collective_agreement.py  ranks agree on the collectives of new code before it runs
failure.py    an exception of this rank, or of the machine, such as a full disk -> the failed check
watch.py      the thread that ends a run in which a rank hangs, has died or has failed
last_state.py the state of every rank when the run ends early
call_numbers.py  what every rank had issued before each steady call
stuck.py      these states -> the rank that the others wait for; pure
fusion.py     kernels of this rank, against a baseline
checks.py     digests -> the checks of modes A, B and C; torch-free
beside.py     what ranks compile beside the program, such as an evaluation on rank 0; torch-free
compiled.py       where compiled code begins to be wrong, while eager is right
wrong_numbers.py         the check of it; where to look first when a target's numbers are wrong; torch-free
replay.py     a run directory -> its verdict again, offline; torch-free
faults/       what `--fault NAME` injects
status.py     state of this rank, for the other ranks and for a reader after a crash
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpcompile.gate.start import run
    from tpcompile.target import Target, TargetContext

__all__ = ["Target", "TargetContext", "run"]

_HOMES = {"Target": "tpcompile.target", "TargetContext": "tpcompile.target", "run": "tpcompile.gate.start"}
"""Name -> the module that has it."""


def __getattr__(name: str) -> Any:
    """Import the modules that need torch on first use; checks and replay do not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
