"""A run that cannot start: the verdict that its launcher finds."""

from __future__ import annotations

from pathlib import Path

from tpcompile import config
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import CheckId
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.ending import refuse


def test_the_check_does_not_read_as_its_opposite(tmp_path: Path) -> None:
    error = ConfigError("there is no function build")
    code = refuse(error, config.load("cpu_smoke"), RunDir.create(tmp_path / "run").path, rank=0, quiet=True)
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None and verdict.exit_code == code == 2
    (check,) = verdict.checks
    assert (check.id, check.name) == (CheckId.CAN_START, "start of the run")
    assert (check.expected, check.observed) == ("no error", str(error))
