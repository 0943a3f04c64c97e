"""A torchrun target: the gate, whose rank 0 takes its time before it can report; `late_start.py FLAGS`."""

from __future__ import annotations

import time
from typing import Any

from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.in_rank import main

_write_config = RunDir.write_config


def _late(*given: Any) -> None:
    """Delay rank 0 after it has joined the group and before its session starts."""
    time.sleep(3.0)
    _write_config(*given)


if __name__ == "__main__":
    RunDir.write_config = _late  # type: ignore[method-assign]  # in a rank's process, which ends here
    raise SystemExit(main(__doc__ or ""))
