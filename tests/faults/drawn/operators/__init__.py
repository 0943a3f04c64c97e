"""Edits that plant a fault in a program, or a harmless difference: `FAULTS`, `HEALTHY`, and `ALL` by name.

A module is named after what its operators change.
"""

from __future__ import annotations

from tests.faults.drawn.operators import (
    collectives,
    compiling,
    healthy,
    inputs,
    process,
    region,
    running,
    state,
)
from tests.faults.drawn.operators.operator import Operator
from tests.faults.registry import Registry

FAULTS: tuple[Operator, ...] = (
    *region.OPERATORS,
    *collectives.OPERATORS,
    *inputs.OPERATORS,
    *state.OPERATORS,
    *compiling.OPERATORS,
    *running.OPERATORS,
    *process.OPERATORS,
)
HEALTHY: tuple[Operator, ...] = healthy.OPERATORS
ALL: Registry[Operator] = Registry("operator")
for _operator in (*FAULTS, *HEALTHY):
    ALL.add(_operator)
