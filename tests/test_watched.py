"""`tpcompile run`: real torchrun jobs of programs that do not mention tpcompile."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, ROOT
from tests.gate.runs import leftovers
from tests.picture import VERDICT, text_of
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.rundir import RunDir
from tpcompile.recording.flow import IS_POSSIBLE
from tpcompile.watched import Settings, environment

pytestmark = [pytest.mark.timeout(120), pytest.mark.long]
PROGRAM = Path(__file__).parent / "watched_program.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LINES = PROGRAM.read_text().splitlines()
ODD = (0, 1) if IS_POSSIBLE else (1,)
"""Of two ranks that are known to have parted at a branch, nobody is blamed."""


def run(tmp_path: Path, command: list[str], *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`tpcompile run` in a folder, whose run directory is `run`."""
    script = (
        "import os, sys; os.environ['LAUNCHER'] = str(os.getpid());"
        "from tpcompile.cli import main; sys.argv[1:] = sys.argv[1:]; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", script, "run", "--run-dir", str(tmp_path / "run"), *options, "--", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=tmp_path,
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PYTHONPATH": PYTHONPATH,
            "OMP_NUM_THREADS": "1",
            **environ,
        },
    )


def line_with(text: str) -> int:
    return next(number for number, line in enumerate(LINES, start=1) if text in line)


def test_a_healthy_job_keeps_its_output_and_is_told_to_be_watched(tmp_path: Path) -> None:
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "nothing"], "--html", str(tmp_path / "page.html"))
    assert (done.returncode, done.stdout.count("the program's own output")) == (0, 2)
    assert re.match("tpcompile run: 2 of 2 ranks .*compiles .*: 1; nothing differs", done.stderr.splitlines()[-1])
    assert "numbers: not compared" in done.stderr
    assert list((tmp_path / "run" / "trace").iterdir()), "torch's logs, for diagnose"
    page = (tmp_path / "page.html").read_text()
    assert "PASS (exit 0)" in page
    assert all(kind in page for kind in ('["compile",', '["collective",')), "what each rank did, by its sentinel"


@pytest.mark.parametrize(
    ("what", "cause", "ranks", "line"),
    [
        ("leaves early", {Cause.STUCK_COLLECTIVE, Cause.PARTED}, ODD, {"dist.all_reduce(", "if WHAT == \"leaves"}),
        ("raises", {Cause.RAISED}, (0,), {"raise ValueError"}),
    ],
)  # fmt: skip
def test_a_fault_is_named_last_and_in_the_report_of_torchrun(
    tmp_path: Path, what: str, cause: set[Cause], ranks: tuple[int, ...], line: set[str]
) -> None:
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), what], "-q")
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert verdict is not None and verdict.lead is not None and verdict.lead.line is not None
    assert verdict.lead.cause in cause
    assert verdict.lead.ranks == ranks
    assert verdict.lead.line.line in set(map(line_with, line))
    assert done.returncode == 1
    of_torchrun, _, after = done.stderr.rpartition("=====\n")
    assert "FAIL (exit 1)" in after, "the verdict is the last thing on the screen"
    root_cause = of_torchrun.partition("Root Cause")[2]
    assert verdict.lead.cause in root_cause or "ValueError: a bad batch" in root_cause
    assert (tmp_path / "run" / "junit.xml").exists()


def test_a_finding_after_which_the_job_goes_on_is_told_last(tmp_path: Path) -> None:
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "recompiles"], "--policy", "warn")
    assert (done.returncode, done.stdout.count("the program's own output")) == (0, 2)
    last = done.stderr.splitlines()[-1]
    assert "rank divergence: " in last and Cause.SHAPE in last and "nothing differs" not in last


def test_a_recompile_of_one_rank_that_no_collective_follows_is_said(tmp_path: Path) -> None:
    """Nothing shows that the ranks made the same call: the job ends well, and the line says what is known."""
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "recompiles last"])
    assert done.returncode == 0
    last = done.stderr.splitlines()[-1]
    assert "only rank 1 recompiled" in last
    assert f"watched_program.py:{line_with('layer(torch.ones(3 if')}" in last


def test_the_example_of_the_readme_is_named_as_it_says(tmp_path: Path) -> None:
    example = ROOT / "examples" / "overflow.py"
    done = run(tmp_path, [*TORCHRUN, str(example)])
    lead = RunDir(tmp_path / "run").read_verdict().lead
    assert (done.returncode, lead.ranks) == (1, ODD)
    says = f"overflow.py:{lead.line.line} in {lead.line.function}"
    if sys.version_info >= (3, 12):
        assert (lead.cause, lead.line.code) == (Cause.PARTED, "if overflowed(loss):")
        assert f"(ranks 0-1 differ) at examples/{says}" in " ".join(text_of(VERDICT).split()), (
            "make it again: scripts/verdict_svg.py"
        )
    else:
        assert (lead.cause, lead.line.function) == (Cause.STUCK_COLLECTIVE, "synchronize")


def test_an_interrupted_job_ends_as_a_whole_and_says_what_its_logs_show(tmp_path: Path) -> None:
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "hangs"])
    assert done.returncode == 130
    assert RunDir(tmp_path / "run").read_verdict() is not None, "for `tpcompile report`"
    assert "INCOMPLETE" in done.stderr.splitlines()[-1]
    assert leftovers(str(PROGRAM)) == []


def test_an_interrupted_job_says_for_whom_a_rank_has_waited(tmp_path: Path) -> None:
    """The negative control is the test above: where no rank waits for another one, nothing is said."""
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "one hangs"])
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert (done.returncode, verdict.lead.ranks) == (130, (1,))
    check = next(check for check in verdict.checks if check.cause == Cause.NEVER_ARRIVED)
    assert check.line.line == line_with("another process holds the lock")
    assert "INCOMPLETE (exit 6)" in done.stderr.rpartition("=====\n")[2], "it may only have been slow"
    assert leftovers(str(PROGRAM)) == []


def test_a_job_whose_ranks_are_killed_at_once_is_judged_by_what_they_kept(tmp_path: Path) -> None:
    """The negative control is the interrupted job in which no rank waits."""
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "all are killed"])
    verdict = RunDir(tmp_path / "run").read_verdict()
    assert (done.returncode, verdict.exit_code, verdict.lead.ranks) == (1, 6, (1,))
    waits, parts = line_with("nobody will say so"), line_with('if WHAT == "all are killed"')
    assert verdict.lead.line.line in ((parts,) if sys.version_info >= (3, 12) else (waits,))
    assert "INCOMPLETE (exit 6)" in done.stderr.rpartition("=====\n")[2], "it may only have been slow"


def test_a_program_with_a_sentinel_of_its_own_is_watched_by_that_one(tmp_path: Path) -> None:
    done = run(tmp_path, [*TORCHRUN, str(PROGRAM), "own sentinel"], OWN_RUN_DIR=str(tmp_path / "own"))
    assert done.returncode == 0
    assert re.fullmatch("tpcompile run: .*sentinel .*own", done.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("import sys; sys.exit(7)", 7, "no rank was watched"),
        ("import sitecustomize_ran, tpcompile; print(sitecustomize_ran.MARK)", 0, "no rank was watched"),
    ],
)
def test_a_process_without_groups_is_left_alone(tmp_path: Path, code: str, exit_code: int, says: str) -> None:
    """What another `sitecustomize` does is done."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types; made = types.ModuleType('sitecustomize_ran'); made.MARK = 'hidden no more';"
        "sys.modules['sitecustomize_ran'] = made\n"
    )
    page = tmp_path / "page.html"  # of which there is nothing to show
    done = run(tmp_path, [sys.executable, "-c", code], "--html", str(page), PYTHONPATH=f"{tmp_path}:{PYTHONPATH}")
    assert not page.exists() and "no page: " in done.stderr
    assert done.returncode == exit_code
    assert says in done.stderr
    assert ("hidden no more" in done.stdout) == (exit_code == 0)


def test_a_python_without_the_package_runs_unwatched(tmp_path: Path) -> None:
    fake = tmp_path / "torch" / "distributed"
    fake.mkdir(parents=True)
    (fake.parent / "__init__.py").touch()
    (fake / "__init__.py").touch()
    (fake / "distributed_c10d.py").write_text("print('imported')\n")
    settings = Settings(run_dir=str(tmp_path / "run"))
    environ = environment(settings, {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)})
    code = "import torch.distributed.distributed_c10d"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize; {code}"],
        capture_output=True, text=True, check=False, env=environ, cwd="/", timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "imported\n")
    assert "not watched" in done.stderr


def test_a_command_that_is_not_there_is_a_wrong_command_line(tmp_path: Path) -> None:
    done = run(tmp_path, ["torchrunn", "train.py"])
    assert done.returncode == 2
    assert f" torchrunn: {os.strerror(errno.ENOENT)}" in done.stderr
    again = run(tmp_path, [sys.executable, "-c", ""])
    assert again.returncode == 0
