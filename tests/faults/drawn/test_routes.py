"""Generated cases run for real, one for each route, from forked ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.drawn.plan import healthy_case
from tests.forked import run_python

HEALTHY = [(0, "aot_eager", ["sentinel", "diagnose", "check_ranks"]), (2, "inductor", ["sentinel"])]
"""Inductor once: its caches are those of the launch, whatever the route, and empty caches cost 8 s of C++."""
_SCRIPT = Path(__file__).parents[3] / "scripts" / "generated_faults.py"


def _run(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    """The rows of a sweep; a process of its own, since ranks are forked from it."""
    results = tmp_path / "results.json"
    run_python([_SCRIPT, "--json", results, *arguments])
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"]
    return rows


@pytest.mark.slow
def test_a_rank_that_raises_is_named_by_the_sentinel_and_its_program_is_a_file(tmp_path: Path) -> None:
    drawn = ("--program", "hand_function", "--operator", "raised", "--seeds", "11")
    (row,) = _run(tmp_path, *drawn, "--routes", "sentinel", "--keep", str(tmp_path / "kept"))
    assert row["outcome"] == "named", row
    (program,) = tmp_path.glob("kept/fault-*/program.py")
    assert "# fault" in program.read_text()


@pytest.mark.slow
def test_a_rank_constant_is_found_by_the_routes_that_compare_what_was_compiled(tmp_path: Path) -> None:
    drawn = ("--program", "hand_function", "--operator", "rank_constant", "--seeds", "11")
    rows = _run(tmp_path, *drawn, "--routes", "diagnose,check_ranks")
    assert {row["route"]: row["outcome"] for row in rows} == {"diagnose": "named", "check_ranks": "named"}, rows


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "backend", "routes"), HEALTHY)
def test_a_healthy_program_is_green_on_all_routes(seed: int, backend: str, routes: list[str], tmp_path: Path) -> None:
    assert healthy_case(seed, program="hand_function", operator="unmutated").backend == backend
    drawn = ("--kind", "healthy", "--program", "hand_function", "--operator", "unmutated", "--seeds", str(seed))
    rows = _run(tmp_path, *drawn, "--routes", ",".join(routes))
    assert {row["route"]: row["outcome"] for row in rows} == dict.fromkeys(routes, "green"), rows
