"""Real ranks that take different branches: the verdict leads with the branch, and what each rank did there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ROOT, Ended, torchrun
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import CheckId, Lead, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.conclude import NOT_RECORDED
from tpcompile.evidence.timeline.flow import LINE_BITS, Kind
from tpcompile.gate.replay import replay
from tpcompile.sentinel import Sentinel
from tpcompile.sentinel.afterwards import judged
from tpcompile.sentinel.executed import Executed
from tpcompile.testing import run_on_ranks

PROGRAM = ROOT / "tests/sentinel/branches.py"


def line_with(text: str) -> int:
    """Number of the one line of the program that begins with this text."""
    (number,) = [
        number for number, line in enumerate(PROGRAM.read_text().splitlines(), start=1) if line.strip().startswith(text)
    ]
    return number


def job(form: str, folder: Path, environ: Mapping[str, str] = os.environ) -> tuple[Ended, Lead | None]:
    done = torchrun([PROGRAM, form], cwd=folder, environ=environ)
    if not list(folder.glob("runs/*")):
        return done, None
    verdict = verdict_in(folder)
    assert (NOT_RECORDED in verdict.checks) == (form == "off")
    return done, verdict.lead


def verdict_in(folder: Path) -> Verdict:
    (run,) = folder.glob("runs/*-sentinel-*")
    found = RunDir.open(run).read_verdict()
    assert found is not None
    assert replay(RunDir.open(run)).lead == found.lead  # `tpcompile compare` says the same
    again = judged([run])  # and so does `tpcompile diagnose`, which does not read the verdict
    assert again is not None and (again.lead, again.exit_code) == (found.lead, found.exit_code)
    return found


@pytest.mark.slow
@pytest.mark.ranks
def test_the_branch_that_made_later_collectives_differ_is_the_finding_and_they_are_the_consequence(
    tmp_path: Path,
) -> None:
    """One rank skips a step, and the ranks meet in different collectives two steps later."""
    done, lead = job("skips", tmp_path)
    assert done.returncode == 1
    assert lead is not None and lead.parted is not None
    assert (lead.cause, lead.ranks, lead.is_rank_known) == (Cause.PARTED, (0, 1), False)
    assert lead.line is not None
    assert (Path(lead.line.file).name, lead.line.line, lead.line.code) == (
        "branches.py", line_with("if not must_skip(step):"), "if not must_skip(step):"
    )  # fmt: skip
    sides = {side.ranks: (side.line and side.line.line, side.is_as_before) for side in lead.parted.sides}
    assert sides == {
        (0,): (line_with("optimizer.step()"), True), (1,): (line_with("if dist.get_rank() == 0:"), False)
    }  # fmt: skip
    assert lead.parted.times == 5
    own = [check for check in verdict_in(tmp_path).checks if check.is_red and not check.is_consequence]
    assert [(check.id, check.line, check.ranks) for check in own] == [(CheckId.SAME_BRANCHES, lead.line, (0, 1))]
    assert lead.consequence


@pytest.mark.slow
@pytest.mark.ranks
def test_a_branch_that_all_ranks_decide_from_an_agreed_value_is_green(tmp_path: Path) -> None:
    done, lead = job("agrees", tmp_path)
    assert (done.returncode, lead) == (0, None), done.stderr


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "ranks", "branch"),
    [("aborts", None, "if rows == 2:"), ("domains", (0, 1), 'if FORM == "domains" and')],
)
def test_the_branch_is_found_in_rings(form: str, ranks: tuple[int, ...] | None, branch: str, tmp_path: Path) -> None:
    """Of a rank that gloo aborted, which may be either; and of a rank of a different domain, which is not asked."""
    done, lead = job(form, tmp_path)
    assert done.returncode == 1
    assert lead is not None and lead.line is not None
    assert (lead.cause, lead.ranks, lead.line.line) == (Cause.PARTED, ranks or lead.ranks, line_with(branch))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_was_killed_has_taken_no_other_branch(tmp_path: Path) -> None:
    own = tmp_path / "temporary"
    own.mkdir()
    done, lead = job("killed", tmp_path, {**os.environ, "TMPDIR": str(own)})
    assert done.returncode == 1
    assert lead is not None
    assert (lead.cause, lead.ranks, lead.parted) == (Cause.KILLED, (1,), None)
    assert list(own.rglob("*.ring")) == []


@pytest.mark.slow
@pytest.mark.ranks
def test_what_was_set_before_the_block_is_known_without_executed_lines_too(tmp_path: Path) -> None:
    """Before Python 3.12 no lines are recorded here."""
    done, lead = job("setting", tmp_path)
    assert done.returncode == 1
    assert lead is not None and lead.line is not None and lead.parted is not None
    assert (Path(lead.line.file).name, lead.line.line) == ("branches.py", line_with("self.scale = 2.0 if is_old"))
    assert {side.ranks: side.value for side in lead.parted.sides} == {
        (0,): "sets settings.scale = 1.0",
        (1,): "sets settings.scale = 2.0",
    }


@pytest.mark.slow
@pytest.mark.ranks
def test_without_executed_lines_the_collectives_alone_are_compared(tmp_path: Path) -> None:
    """The negative control of the first test."""
    done, lead = job("off", tmp_path)
    assert done.returncode == 1
    assert lead is not None and lead.parted is None
    assert lead.cause is not Cause.PARTED


def raises_inside() -> tuple[int, int]:
    """Lines of this function: the last one that was kept, and the one that raised."""
    sentinel = Sentinel(flow=True)
    try:
        with sentinel:
            raise ValueError
    except ValueError as error:
        raised_at = error.__traceback__.tb_lineno if error.__traceback__ else 0
    flow = sentinel.executed.flow_of(0)
    assert flow is not None
    here = {number for number, code in enumerate(flow.codes) if code.function == "raises_inside"}
    lines = [packed for number, packed in flow.steps() if number in here and packed >> LINE_BITS == Kind.LINE]
    return lines[-1], raised_at


@pytest.mark.ranks
def test_what_leaving_by_an_exception_executes_is_not_kept() -> None:
    """The `with` itself, which is the last line when the block is left."""
    ((last, raised_at),) = run_on_ranks(raises_inside, world_size=1)
    assert last == raised_at


def enters_twice() -> str:
    """On each rank."""
    sentinel = Sentinel()
    with sentinel:
        pass
    try:
        sentinel.__enter__()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_a_second_block_needs_a_second_sentinel() -> None:
    assert all("one block" in said for said in run_on_ranks(enters_twice))


@pytest.mark.parametrize("flow", ["off", 0, 1])
def test_a_flow_that_is_no_choice_is_refused(flow: Any) -> None:
    """The text "off" would switch it on."""
    unused: Any = None
    with pytest.raises(ConfigError, match=f"flow={flow!r} "):
        Executed(unused, unused, unused, flow=flow, follow=())
    Executed(unused, unused, unused, flow=False, follow=())
