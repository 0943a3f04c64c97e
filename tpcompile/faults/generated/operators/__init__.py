"""All operators by what they change; `ALL`, `FAULTS`, `HEALTHY`."""

from __future__ import annotations

from tpcompile.faults.generated.operators import (
    collectives,
    compiling,
    healthy,
    inputs,
    process,
    region,
    running,
    state,
)
from tpcompile.faults.generated.operators.operator import Operator

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
ALL: dict[str, Operator] = {operator.name: operator for operator in (*FAULTS, *HEALTHY)}

assert len(ALL) == len(FAULTS) + len(HEALTHY), "two operators of one name"
