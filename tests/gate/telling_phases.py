"""A torchrun target: the gate, whose ranks print each phase that they enter; `telling_phases.py FLAGS`."""

from __future__ import annotations

from tests.gate.unwritable import before
from tpcompile.gate.in_rank import main
from tpcompile.gate.status import StatusBoard

if __name__ == "__main__":
    before(StatusBoard, "enter", lambda board, phase: print(f"enters {phase}"))
    raise SystemExit(main(__doc__ or ""))
