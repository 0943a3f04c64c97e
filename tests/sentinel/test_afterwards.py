"""Jobs of which nobody lived to judge: what `diagnose` says of the files and rings that their ranks left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ROOT, torchrun
from tests.sentinel.test_executed import PROGRAM, line_with
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.evidence.records import Check, CheckId, Status, UserLine, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.evidence.timeline.flow import Code, Flow
from tpcompile.sentinel.afterwards import judged
from tpcompile.sentinel.kept import STOPPED, TERMINATED, Kept, kept_file
from tpcompile.sentinel.messages import FINISHED, Issued, RankState
from tpcompile.sentinel.process import Process

GROUP = "0 default_pg"
MEMBERS = {GROUP: (0, 1)}


def at(line: int) -> UserLine:
    return UserLine(file="train.py", line=line, function="train")


def issued(number: int, *, line: int = 10, is_done: bool = True, sizes: str = "8") -> Issued:
    return Issued(
        group=GROUP, seq=number, op="all_reduce", sizes=sizes, dtypes="Float", is_done=is_done, age_s=9.0 - number,
        stack=(at(line),),
    )  # fmt: skip


def state(rank: int, *collectives: Issued, ended: str = "", line: int = 10) -> RankState:
    return RankState(
        rank=rank, activity="running", since_s=5.0, stack=(at(line),), issued=collectives, members=MEMBERS,
        groups=(GROUP,), blocked=any(not one.is_done for one in collectives), ended=ended,
    )  # fmt: skip


def keep(folder: Path, rank: int, **known: object) -> None:
    kept = Kept(rank=rank, world_size=2, domain="all", members=(0, 1), process=Process(), at_s=float(rank), **known)  # type: ignore[arg-type]
    RunDir(folder).write_text(kept_file(rank), kept.to_json())


def found(folder: Path) -> Verdict:
    verdict = judged([folder])
    assert verdict is not None
    return verdict


WAITS = state(0, issued(1), issued(2, is_done=False))


def test_a_rank_that_waited_when_the_job_was_killed_names_the_one_it_waited_for(tmp_path: Path) -> None:
    keep(tmp_path, 0, state=WAITS)
    keep(tmp_path, 1, state=state(1, issued(1), line=77))
    verdict = found(tmp_path)
    assert verdict.lead is not None and verdict.lead.line is not None
    assert (verdict.lead.cause, verdict.lead.ranks, verdict.lead.line.line) == (Cause.NEVER_ARRIVED, (1,), 77)
    assert (verdict.status, verdict.exit_code) == (Status.SKIPPED, ExitCode.INCOMPLETE), "it may have been slow"


def test_a_rank_that_waited_and_went_on_waited_for_nobody(tmp_path: Path) -> None:
    """The negative control: its ring has steps after the wait that it kept."""
    for num_recorded in (4, 5):
        keep(
            tmp_path,
            0,
            state=WAITS,
            num_recorded=num_recorded,
            flow=Flow(codes=(Code(file="a.py", function="f", line=1),), num_before=5),
        )
        keep(tmp_path, 1, state=state(1, issued(1), line=77))
        assert (found(tmp_path).lead is not None) == (num_recorded == 5)


def test_ranks_that_waited_in_different_collectives_are_named_as_live(tmp_path: Path) -> None:
    keep(tmp_path, 0, state=WAITS)
    keep(tmp_path, 1, state=state(1, issued(1), issued(2, line=20, is_done=False, sizes="16")))
    verdict = found(tmp_path)
    assert verdict.lead is not None and verdict.exit_code == ExitCode.FAIL
    assert verdict.lead.cause in (Cause.STUCK_COLLECTIVE, Cause.COLLECTIVE_SIZES)
    assert {check.id for check in verdict.checks if check.is_red} == {CheckId.MOVING}


def test_a_rank_that_finished_is_why_the_other_one_waited(tmp_path: Path) -> None:
    keep(tmp_path, 0, state=WAITS)
    keep(tmp_path, 1, state=state(1, issued(1), ended=FINISHED), end=FINISHED)
    verdict = found(tmp_path)
    assert verdict.lead is not None
    assert (verdict.lead.cause, verdict.lead.ranks, verdict.exit_code) == (Cause.STUCK_COLLECTIVE, (1,), ExitCode.FAIL)


def test_a_rank_that_finished_is_why_the_other_one_failed(tmp_path: Path) -> None:
    failed = "RuntimeError: Connection closed by peer"
    past = [issued(number) for number in range(1, 6)]
    keep(tmp_path, 0, state=state(0, *past, issued(6), ended=failed), end=failed)
    keep(tmp_path, 1, state=state(1, *past, ended=FINISHED), end=FINISHED)
    verdict = found(tmp_path)
    assert verdict.lead is not None
    assert (verdict.lead.cause, verdict.lead.ranks, verdict.exit_code) == (Cause.STUCK_COLLECTIVE, (1,), ExitCode.FAIL)


def test_a_rank_without_a_word_is_gone_where_others_wrote_how_they_ended(tmp_path: Path) -> None:
    keep(tmp_path, 0, state=state(0, issued(1)), end=TERMINATED)
    keep(tmp_path, 1, state=state(1, issued(1)))
    verdict = found(tmp_path)
    assert verdict.lead is not None
    assert (verdict.lead.cause, verdict.lead.ranks) == (Cause.KILLED, (1,))


@pytest.mark.parametrize("end", [TERMINATED, FINISHED, ""])
def test_ranks_that_ended_alike_in_the_midst_of_work_are_not_blamed(tmp_path: Path, end: str) -> None:
    for rank in (0, 1):
        keep(tmp_path, rank, state=state(rank, issued(1)), end=end)
    verdict = found(tmp_path)
    assert (verdict.lead, verdict.exit_code) == (None, ExitCode.INCOMPLETE)


def test_what_a_rank_knew_counts_before_the_end_that_it_brought_about(tmp_path: Path) -> None:
    def failed(cause: Cause, rank: int) -> Check:
        return Check(
            id=CheckId.NO_ERROR, status=Status.FAIL, expected="", observed="", line=at(30), ranks=(rank,), cause=cause
        )

    keep(tmp_path, 0, state=WAITS, end="RuntimeError: closed", problem=failed(Cause.COMMUNICATION, 0))
    keep(tmp_path, 1, state=state(1, issued(1)), end="ValueError: bad", problem=failed(Cause.RAISED, 1))
    verdict = found(tmp_path)
    assert verdict.lead is not None
    assert (verdict.lead.cause, verdict.lead.ranks, verdict.lead.line) == (Cause.RAISED, (1,), at(30))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    keep(tmp_path, 0, end=STOPPED)
    (tmp_path / kept_file(1)).write_text('{"rank": "x"}')
    with pytest.raises(ConfigError, match=r"rank_1\.json .*damaged"):
        judged([tmp_path])
    done = diagnose(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def diagnose(run: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tpcompile", "diagnose", str(run), "-q", "--json", str(run / "found.json")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=100)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "ranks", "branch"),
    [
        ("killed hanging", (1,), 'if FORM == "killed hanging" and'),
        ("killed skipping", (0, 1), "if not must_skip(step):"),
        ("killed healthy", None, ""),
    ],
)
def test_a_job_whose_ranks_are_killed_at_once(
    tmp_path: Path, form: str, ranks: tuple[int, ...] | None, branch: str
) -> None:
    """The healthy one is the negative control."""
    torchrun([PROGRAM, form], cwd=tmp_path)
    (run,) = tmp_path.glob("runs/*-sentinel-*")
    assert RunDir(run).read_verdict() is None
    done = diagnose(run)
    lead = json.loads((run / "found.json").read_text())["lead"]
    assert done.returncode == ExitCode.INCOMPLETE, done.stderr
    if ranks is None:
        assert lead is None
    else:
        assert (lead["cause"], tuple(lead["ranks"]), lead["line"]["line"]) == (Cause.PARTED, ranks, line_with(branch))
