"""The matrix script under torchrun: its sample is green and written down, a broken gradient turns it red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun

pytestmark = pytest.mark.slow


def run(path: Path, *options: str) -> tuple[int, dict]:
    """Exit code of torchrun and what the script wrote."""
    script = [ROOT / "scripts/correctness_matrix.py", "--sample", "--device", "cpu", "--json", path]
    done = torchrun([*script, *options], cwd=ROOT, timeout_s=240)
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text())


def test_sample_is_green_and_written_down(tmp_path: Path) -> None:
    code, found = run(tmp_path / "green.json", "--forms", "kv replicated", "--limit-s", "200")
    assert (code, found["summary"]["failed"], found["left_out"]) == (0, 0, [])
    cells = {(c["tp"], c["program"]): c for c in found["cells"]}
    assert cells.keys() == {(tp, program) for tp in (1, 2) for program in ("eager", "aot_eager")}
    assert all(c["ratio"] <= found["limit"] and c["tensor"] for c in cells.values())
    assert cells[2, "eager"]["collectives"] == cells[2, "aot_eager"]["collectives"] > 0
    assert {"command", "machine", "versions", "seed", "seconds"} <= found.keys()


def test_fault_turns_it_red_on_two_ranks_and_cells_left_out_for_time_are_reported(tmp_path: Path) -> None:
    options = ("--forms", "wan", "--programs", "eager", "--fault", "partial_gradient")
    code, found = run(tmp_path / "red.json", *options)
    assert code != 0
    by_tp = {c["tp"]: c for c in found["cells"]}
    assert by_tp[1]["passed"] and not by_tp[2]["passed"]
    assert any("grad " in text for text in by_tp[2]["failures"])


def test_cells_without_time_are_listed_as_left_out(tmp_path: Path) -> None:
    code, found = run(tmp_path / "late.json", "--forms", "wan", "--programs", "eager", "--limit-s", "0")
    assert code != 0 and found["cells"] == []
    cells = [text.partition(":")[0] for text in found["left_out"]]
    assert cells == ["wan/float32/1/eager", "wan/float32/2/eager"]
