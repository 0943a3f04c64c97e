"""`tpcompile dryrun`: ranks of jobs that were never started, and one of them with a fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.forked import ROOT, Ended, run_python
from tpcompile.evidence.digests.digest import digest_rank
from tpcompile.evidence.records import CheckId, Layer, RankDigest, RankRecord, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.records.reader import read_object, validated
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.replay import replay

TARGETS = ROOT / "tests/dryrun/targets.py"


def dryrun(folder: Path, *arguments: str, function: str = "targets:build") -> tuple[Ended, Verdict | None]:
    """The command, and its verdict."""
    ended = run_python(command_of(folder, *arguments, function=function), cwd=ROOT, timeout_s=280)
    return ended, RunDir(folder / "run").read_verdict()


def command_of(folder: Path, *arguments: str, function: str) -> list[str]:
    """The arguments of Python; the run directory is `folder`/run."""
    return ["-m", "tpcompile.dryrun", f"tests.dryrun.{function}", *arguments, "--run-dir", str(folder / "run")]


def line_of(marker: str) -> int:
    (number,) = (n for n, line in enumerate(TARGETS.read_text().splitlines(), 1) if line.endswith(f"# fault: {marker}"))
    return number


def records(folder: Path) -> dict[int, RankRecord]:
    found = {}
    for path in RunDir(folder / "run").rank_files("record.json"):
        record = validated(RankRecord, read_object(path), path)
        found[record.rank] = record
    return found


def test_a_healthy_plan_passes_and_only_the_outer_groups_are_traced(tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--mesh", "dp=256,tp=4")
    assert (ended.returncode, verdict is not None) == (0, True), ended.stdout + ended.stderr
    assert verdict is not None
    assert verdict.world_size == 1024
    assert "; 10 of 1,024 ranks" in verdict.summary
    kept = sorted(records(tmp_path))
    first, *between, last = sorted({rank // 4 for rank in kept})
    assert (first, len(between), last) == (0, 1, 255)
    domains = {f"tp {4 * group}-{4 * group + 3}" for group in (first, *between, last)}
    assert set(verdict.domains) == domains
    assert (kept[:4], len(kept)) == ([0, 1, 2, 3], 6)  # of an inner group that agrees, once


CAUSES = {
    "constant": Cause.RANK_CONSTANT, "branch": Cause.RANK_BRANCH, "break": Cause.GRAPH_BREAK,
    "layer": Cause.RANK_BRANCH, "shape": Cause.SHAPE,
}  # fmt: skip


@pytest.mark.parametrize("fault", CAUSES)
def test_a_fault_on_one_rank_is_named(fault: str, tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--mesh", "dp=2,tp=4", "--set", f"fault={fault}", "--set", "odd=5")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None
    assert verdict.lead is not None
    assert list(verdict.lead.ranks) == [5]
    again = replay(RunDir(tmp_path / "run"))
    assert (again.exit_code, again.lead and again.lead.ranks) == (1, (5,))
    red = [one for one in verdict.divergences if one.is_red]
    assert {one.domain for one in red} == {"tp 4-7"}
    assert verdict.lead.cause is CAUSES[fault]
    assert verdict.lead.line is not None
    assert (Path(verdict.lead.line.file), verdict.lead.line.line) == (TARGETS, line_of(fault))
    seen_at = verdict.lead.seen_at or verdict.lead.line
    assert ROOT / "tpcompile" not in Path(seen_at.file).parents  # what calls the program is ours
    assert not list((tmp_path / "run").glob("rank_*/left.json"))


def test_a_layer_more_on_one_of_two_ranks_is_named_where_it_is_added(tmp_path: Path) -> None:
    faulty = ("--set", "fault=layer", "--set", "odd=1")
    ended, verdict = dryrun(tmp_path, "--mesh", "tp=2", *faulty, function="llama:build")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None and verdict.lead is not None and verdict.lead.line is not None
    assert verdict.lead.line.code == 'if fault == "layer" and rank == odd:'
    (seen_at,) = {one.line.code for one in verdict.divergences if one.is_red and one.line is not None}
    assert seen_at == "x_BSD = layer(x_BSD, angles_Sd)"  # of the program, in a loop


def test_a_rank_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--world-size", "4", "--set", "fault=raise", "--set", "odd=2")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None
    (check,) = (check for check in verdict.checks if check.id == CheckId.NO_ERROR)
    assert check.ranks == (2,)
    assert check.line is not None
    assert check.line.line == line_of("raise")


def test_a_sample_of_whole_groups_compares_them(tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--mesh", "dp=64,tp=2", "--ranks", "6", "--set", "fault=layer", "--set", "odd=1")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdict is not None
    assert [len(ranks) for groups in verdict.domains.values() for ranks in groups][:1] == [1]
    assert len(verdict.domains) == 3


def test_a_sample_that_agrees_is_incomplete_and_says_its_seed(tmp_path: Path) -> None:
    ended, verdict = dryrun(tmp_path, "--mesh", "dp=256,tp=4", "--ranks", "3", "--seed", "5")
    assert ended.returncode == 6, ended.stdout + ended.stderr
    assert verdict is not None
    assert re.search("; 3 of 1,024 ranks .*seed 5$", verdict.summary)
    assert replay(RunDir(tmp_path / "run")).exit_code == 6


def test_a_program_for_gpus_is_traced_without_one(tmp_path: Path) -> None:
    ended, _ = dryrun(tmp_path, "--world-size", "2", function="targets:on_cuda")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {layer for record in records(tmp_path).values() for layer in _layers(record)} >= {Layer.GRAPH, Layer.GUARDS}


def _layers(record: RankRecord) -> set[Layer]:
    digest: RankDigest = digest_rank(record)
    return set(digest.observed)


def test_no_rank_sees_what_the_one_before_it_has_set(tmp_path: Path) -> None:
    """A rank imports the user's module itself, and its record is the one that it leaves after other ranks."""
    ended, _ = dryrun(tmp_path / "all", "--mesh", "dp=3,tp=1", "--jobs", "1", function="reads_at_import:build")
    assert ended.returncode == 6, ended.stdout + ended.stderr  # each rank is alone in its group
    assert sorted(records(tmp_path / "all")) == [0, 1, 2]  # a read at import is one: all are traced
    dryrun(tmp_path / "plan", "--world-size", "4", "--jobs", "1")
    dryrun(tmp_path / "last", "--world-size", "4", "--ranks", "2", "--jobs", "1")
    together, alone = records(tmp_path / "plan")[3], records(tmp_path / "last")[3]
    both = [[one.layers for one in digest_rank(record).compiles] for record in (together, alone)]
    assert both[0] == both[1]  # records have ids of objects, which differ


def test_nothing_compiled_is_never_green(tmp_path: Path) -> None:
    ended, _ = dryrun(tmp_path, "--world-size", "2", function="targets:nothing")
    assert ended.returncode == 5, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mesh", "dp=2,tp"), "'tp' is no axis"),
        (("--mesh", "dp=2,tp=2", "--world-size", "8"), "has 4 ranks and --world-size is 8"),
        ((), "nothing is compared among fewer than 2 ranks"),
        (("--world-size", "4", "--ranks", "1"), "--ranks 1"),
        (("--world-size", "4", "--set", "no"), "no"),
    ],
)
def test_a_job_that_cannot_be_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    ended, verdict = dryrun(tmp_path, *arguments)
    assert (ended.returncode, verdict) == (2, None)
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
