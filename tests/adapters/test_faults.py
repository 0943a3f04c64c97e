"""Faults by hand in such programs: the printed text names the rank, the cause and the user's line, within seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.faults import FAULTS, HOOKS, LLAMA, PLAN, Fault
from tests.adapters.programs import run_edited
from tests.adapters.test_adapters import needed

CHOSEN = {
    (HOOKS, "constant"), (HOOKS, "graph break"), (PLAN, "missing collective"),
    (PLAN, "layout: in the setup, which is watched too"), (LLAMA, "layout: a different plan"),
}  # fmt: skip
"""scripts/adapters.py runs all; tests/gate/test_target.py has a collective that a Llama misses."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [fault for fault in FAULTS if (fault.style, fault.name) in CHOSEN],
    ids=lambda fault: f"{fault.style}: {fault.name}",
)
def test_a_fault_on_one_rank_is_found_with_its_rank_cause_and_line(fault: Fault, tmp_path: Path) -> None:
    needed(fault.adapter)
    edits = [*fault.edits, *fault.adapter.smaller]
    outcome = run_edited(fault.adapter, edits, tmp_path, backend="aot_eager")
    assert fault.judge(outcome) == {"found": True, "named": True, "line": True}, outcome.text


def test_there_are_five_faults_in_each_style() -> None:
    kinds = {(fault.style, fault.name.partition(":")[0]) for fault in FAULTS}
    five = ("constant", "graph break", "dtype", "missing collective", "layout")
    assert {(style, kind) for style in (HOOKS, PLAN, LLAMA) for kind in five} <= kinds
    names = {(fault.style, fault.name) for fault in FAULTS}
    assert names >= CHOSEN
