"""`tpcompile bench` on two ranks of this machine: one run with right, wrong and failing programs, one with a death."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import run_python
from tpcompile.bench.records import Report

pytestmark = pytest.mark.slow
QUICK = ("--set", "compile.backend=eager", "--rounds", "2", "--device", "cpu")
OWN = "tests/bench/programs.py"
PEERS = "scripts/bench_peers/peers.py"


def bench(*programs: str, folder: Path) -> tuple[int, str, Report]:
    """Exit code, output, report; no process is left running."""
    command = [
        "-m",
        "tests.bench.forked",
        "tpcompile",
        "bench",
        *QUICK,
        "--logs",
        folder / "logs",
        "--json",
        folder / "report.json",
    ]
    ended = run_python([*command, *(word for name in programs for word in ("--program", name))])
    assert ended.left_running == ()
    report = Report.model_validate_json((folder / "report.json").read_text())
    return ended.returncode, ended.stdout + ended.stderr, report


def test_a_wrong_program_loses_its_ratios_and_a_failing_one_is_a_row(tmp_path: Path) -> None:
    programs = ("A", "C", f"{OWN}:unsummed", f"{OWN}:raises", "C:graphed", f"{OWN}:model", f"{PEERS}:hooks")
    code, output, report = bench(*programs, folder=tmp_path)
    assert code == 1, output
    (measured,) = report.measured
    assert measured.why_no_power == ""  # it is a matter of GPUs
    rows = {row.name: row for row in measured.rows}
    assert list(rows) == list(programs)
    assert len(rows["C"].rounds_ms) == len(rows["A"].rounds_ms) == 2
    assert rows["C"].error_ratio is not None and rows["C"].error_ratio <= measured.error_limit
    assert rows["C"].regions_per_call == 1
    assert rows["A"].regions_per_call is not None and rows["A"].regions_per_call > 1
    assert measured.differs(rows[f"{OWN}:unsummed"])
    assert f"FAIL cpu_smoke {OWN}:unsummed:" in output
    assert rows[f"{OWN}:raises"].has_failed and "ValueError" in rows[f"{OWN}:raises"].why_not
    log = tmp_path / "logs" / "cpu_smoke.tests-bench-programs.py-raises.rank1.log"
    assert "Traceback" in log.read_text()
    assert rows["C:graphed"].why_not == "needs GPUs"
    own, peer = rows[f"{OWN}:model"], rows[f"{PEERS}:hooks"]
    assert own.reference and not peer.reference
    assert own.regions_per_call == 1
    for row in (own, peer):
        assert len(row.rounds_ms) == 2
        assert row.error_ratio is not None and row.error_ratio <= measured.error_limit


def test_a_rank_that_dies_ends_the_run_and_is_named(tmp_path: Path) -> None:
    code, output, report = bench(f"{OWN}:dies", folder=tmp_path)
    assert code == 1, output
    (measured,) = report.measured
    assert measured.ended_early and measured.ended_early in output
    assert re.findall(r"rank \d|-\d+", measured.ended_early) == ["rank 1", "-9"]
