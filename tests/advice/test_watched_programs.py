"""Pages whose cause shows only while ranks run: their programs on two real ranks, watched as under `tpcompile run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.pages import Example, example
from tests.advice.played import WATCHED
from tests.forked import Ended, torchrun
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
OWN_CHECK = frozenset({Cause.INPUT_VALUES, Cause.WEIGHTS})
"""Their programs make the check themselves, and say what it found."""
OWN_SENTINEL = frozenset({Cause.AGREED_VALUES})
"""Their programs make the sentinel that they call."""
WATCHED_BY = Path(__file__).parent / "watched.py"


def shown(cause: Cause) -> Example:
    found = example(cause)
    assert found is not None
    return found


def job(cause: Cause, source: str, folder: Path) -> tuple[Ended, str]:
    """How the job ended, and the cause that its verdict leads with; empty for none."""
    program = folder / "program.py"
    program.write_text(source)
    if cause in OWN_CHECK:
        ended = torchrun([program], cwd=folder)
        return ended, cause if f"AssertionError: {cause.value}" in ended.stderr else ""
    if cause in OWN_SENTINEL:
        ended = torchrun([program], cwd=folder)
        (run_dir,) = folder.glob("runs/*") if ended.returncode else [folder]
        return ended, _cause_in(run_dir)
    flow = "flow" if cause == Cause.PARTED else "no flow"
    ended = torchrun([WATCHED_BY, program, folder / "run", flow], cwd=folder)
    return ended, _cause_in(folder / "run")


def _cause_in(run_dir: Path) -> str:
    verdict = RunDir(run_dir).read_verdict()
    return verdict.lead.cause if verdict is not None and verdict.lead is not None else ""


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause in WATCHED], ids=lambda cause: cause.slug)
def test_the_program_is_red_with_its_cause_and_green_with_what_the_page_says(cause: Cause, tmp_path: Path) -> None:
    page = shown(cause)
    for number, (source, led_by) in enumerate([(page.program, cause), *((fix.program, "") for fix in page.fixes)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        ended, found = job(cause, source, folder)
        assert (found, ended.returncode == 0) == (led_by, led_by == ""), (found, ended.stderr[:3000])
