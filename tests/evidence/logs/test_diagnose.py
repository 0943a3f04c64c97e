"""TORCH_TRACE files of jobs that know nothing of this package -> cause, ranks and the user's line, or green."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tpcompile.errors import ConfigError
from tpcompile.evidence.compiles.normalised import OBJECT_IDS
from tpcompile.evidence.judgement import checks
from tpcompile.evidence.logs.diagnose import FAILED, Question, diagnose
from tpcompile.evidence.logs.domains import parse_mesh
from tpcompile.evidence.logs.ends import Lack
from tpcompile.evidence.records import Check, CheckId, DivergenceClass, Status, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.reasons import ReasonKind, parse_reason

JOBS = Path(__file__).parent.parent.parent / "data" / "jobs" / "torch-2.13.0"
LOG = "dedicated_log_torch_trace_rank_{}_recorded.log"


def check(verdict: Verdict, name: str) -> Check:
    """The check of that name."""
    return next(c for c in verdict.checks if c.name == name)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A copy of the stride job, to damage."""
    return Path(shutil.copytree(JOBS / "stride", tmp_path / "job"))


@pytest.mark.parametrize(
    ("name", "cause", "cls", "odd", "code"),
    [
        ("stride", Cause.STRIDE, DivergenceClass.CONTENT, (1,), "def healthy"),
        (
            "reduce_op",
            Cause.REDUCE_OP,
            DivergenceClass.COLLECTIVES,
            (1,),
            "return funcol.wait_tensor(funcol.all_reduce",
        ),
        ("order", Cause.ORDER_FORWARD, DivergenceClass.COLLECTIVES, (1,), "works = [funcol.all_reduce"),
        ("graph_break", Cause.GRAPH_BREAK, DivergenceClass.COLLECTIVES, (0,), 'print("step")'),
        ("limit", Cause.RECOMPILE_LIMIT, DivergenceClass.CONTENT, (1,), "return reduced(x * self.count)"),
    ],
)
def test_the_fault_of_a_recorded_job_is_named(
    name: str, cause: Cause, cls: DivergenceClass, odd: tuple[int, ...], code: str
) -> None:
    verdict = diagnose([JOBS / name])
    assert verdict.exit_code == 1
    (found,) = [d for d in verdict.divergences if d.is_red]
    assert (found.cause, found.cls, found.groups[-1].ranks) == (cause, cls, odd)
    assert found.advice.startswith(cause.advice)
    assert found.line is not None and found.line.file == "/app/tests/data/record_jobs.py"
    assert all(group.line is not None for group in found.groups)
    if not code.startswith("def "):  # torch prints no code for the head of a frame
        assert found.line.code.startswith(code)


def test_a_one_rank_recompile_names_the_guard_and_what_both_sides_have() -> None:
    (found,) = diagnose([JOBS / "stride"]).divergences
    reason = parse_reason(found.guard)
    assert (reason.kind, reason.source, reason.dim) == (ReasonKind.STRIDE, "x", 0)
    assert (reason.expected, reason.actual) == ("4", "1")
    assert "stride[0]" in found.held and found.held.endswith("4")
    shown = [group.item.text for group in found.groups if group.item]
    assert ["stride=[4, 1]" in shown[0], "stride=[1, 4]" in shown[1]] == [True, True]


def test_the_recompile_limit_names_the_last_reason_and_where_it_held() -> None:
    (found,) = diagnose([JOBS / "limit"]).divergences
    assert (found.guard, found.held) == ("self.count == 0", "self.count == 0")
    assert found.cause == Cause.RECOMPILE_LIMIT and found.where.endswith("forward data/record_jobs.py:94")


@pytest.mark.parametrize(("name", "causes"), [("cold_shared", []), ("warm_cold", [Cause.CACHE_SPLIT])])
def test_a_healthy_job_is_green_whatever_its_cache_held(name: str, causes: list[Cause]) -> None:
    verdict = diagnose([JOBS / name])
    assert (verdict.exit_code, [d.cause for d in verdict.divergences]) == (0, causes)


def test_normalised_text_is_counted_and_listed() -> None:
    found = check(diagnose([JOBS / "cold_shared"]), "text that differs by nature")
    assert found.status == Status.INFO and OBJECT_IDS in found.observed and "guards" in found.observed


def test_one_folder_per_rank_is_the_same_as_one_folder(job: Path) -> None:
    for rank in (0, 1):
        (job / str(rank)).mkdir()
        (job / LOG.format(rank)).rename(job / str(rank) / LOG.format(rank))
    assert diagnose([job / "0", job / "1"]) == diagnose([JOBS / "stride"])


def test_the_environment_is_not_observed_and_not_called_equal() -> None:
    found = check(diagnose([JOBS / "cold_shared"]), f"environment {checks.AGREE}")
    assert (found.status, found.observed) == (Status.SKIPPED, "not observed")


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    """A copy of a job whose ranks agree, to damage."""
    return Path(shutil.copytree(JOBS / "cold_shared", tmp_path / "healthy"))


def test_ranks_without_a_log_are_named_and_the_rest_is_no_pass(healthy: Path) -> None:
    (healthy / LOG.format(1)).rename(healthy / LOG.format(2))
    verdict = diagnose([healthy], Question(world_size=4))
    assert (verdict.exit_code, verdict.status) == (6, Status.SKIPPED)
    assert check(verdict, CheckId.LOGS_COMPLETE.text).ranks == (1, 3)
    assert Lack.NO_LOG.value in verdict.summary and "1 more" in verdict.summary


def test_a_difference_is_red_although_a_rank_left_no_log(job: Path) -> None:
    assert diagnose([job], Question(world_size=3)).exit_code == 1


def test_a_gap_between_ranks_is_a_missing_rank_without_a_world_size(healthy: Path) -> None:
    (healthy / LOG.format(1)).rename(healthy / LOG.format(3))
    assert check(diagnose([healthy]), CheckId.LOGS_COMPLETE.text).ranks == (1, 2)


def test_two_logs_of_one_rank_are_refused(job: Path) -> None:
    shutil.copy(job / LOG.format(1), job / "dedicated_log_torch_trace_rank_1_before.log")
    with pytest.raises(ConfigError, match=r"rank 1 .*rank_1_before\.log"):
        diagnose([job])


def test_two_jobs_in_two_folders_are_refused() -> None:
    with pytest.raises(ConfigError, match="ranks 0-1"):
        diagnose([JOBS / "stride", JOBS / "order"])


def test_compiles_after_the_end_of_a_killed_ranks_log_are_not_observed(job: Path) -> None:
    text = (job / LOG.format(0)).read_text()
    (job / LOG.format(0)).write_text(text[:-20])  # rank 0 dies in its last record
    verdict = diagnose([job])
    assert (verdict.exit_code, verdict.divergences) == (6, ())
    assert check(verdict, CheckId.LOGS_COMPLETE.text).ranks == (0,)


@pytest.mark.parametrize(("is_cut", "code"), [(True, 1), (False, 1)], ids=["ended by the failure", "compiled"])
def test_a_compile_that_failed_while_the_others_compiled_is_the_finding(job: Path, is_cut: bool, code: int) -> None:
    failing = (job / LOG.format(0)).read_text()
    metrics = '"compilation_metrics": {'
    error = '"fail_type": "BackendCompilerFailed", "fail_reason": "backend=\'x\' raised:\\nno compiler", '
    (job / LOG.format(0)).write_text(failing.replace(metrics, metrics + error, 1))
    other = job / LOG.format(1)
    if is_cut:
        before = other.read_text().partition('"dynamo_output_graph"')[0]
        other.write_text(before[: before.rindex("\nV") + 1])
    verdict = diagnose([job])
    assert verdict.lead is not None
    assert (verdict.exit_code, verdict.lead.cause, verdict.lead.ranks) == (code, Cause.COMPILE_FAILED, (0,))
    assert (FAILED in {check.name for check in verdict.checks}) == is_cut
    assert "no compiler" in verdict.summary


def places(text: str) -> list[int]:
    """Where to cut a log: around the start of every record, and in between."""
    starts = [match.start() for match in re.finditer(r"^V\d{4} ", text, re.MULTILINE)]
    around = {start + by for start in starts for by in (-1, 0, 1)}
    between = range(0, len(text), max(1, len(text) // 30))
    return sorted(place for place in around.union(between) if 0 <= place < len(text) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["cold_shared", "warm_cold"])
def test_a_healthy_job_with_one_log_cut_anywhere_is_neither_red_nor_green(name: str, rank: int, healthy: Path) -> None:
    shutil.copytree(JOBS / name, healthy, dirs_exist_ok=True)
    text = (JOBS / name / LOG.format(rank)).read_text()
    for place in places(text):
        (healthy / LOG.format(rank)).write_text(text[:place])
        assert diagnose([healthy]).exit_code == 6, place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"), [("stride", 0), ("limit", 0), ("graph_break", 1), ("reduce_op", 0), ("order", 0)]
)
def test_a_faulty_job_with_the_log_of_the_other_rank_cut_anywhere_never_passes(
    name: str, other: int, tmp_path: Path
) -> None:
    job = Path(shutil.copytree(JOBS / name, tmp_path / "job"))
    text = (job / LOG.format(other)).read_text()
    for place in places(text):
        (job / LOG.format(other)).write_text(text[:place])
        verdict = diagnose([job])
        assert verdict.exit_code in (1, 6), place
        assert "ranks agree; " not in verdict.summary, place


def test_an_empty_log_never_passes(healthy: Path) -> None:
    (healthy / LOG.format(1)).write_text("")
    verdict = diagnose([healthy])
    assert (verdict.exit_code, check(verdict, CheckId.LOGS_COMPLETE.text).ranks) == (6, (1,))
    assert Lack.EMPTY.value in verdict.summary


def test_a_pass_says_what_the_logs_do_not_show(healthy: Path) -> None:
    verdict = diagnose([healthy], Question())
    assert verdict.exit_code == 0
    assert "--ended-badly" in verdict.summary


def test_a_job_that_ended_badly_while_its_compiles_agree_is_no_pass(healthy: Path) -> None:
    verdict = diagnose([healthy], Question(ended_badly=True))
    assert verdict.exit_code == 6
    assert re.search("ranks 0-1: .*0/0 of healthy", verdict.summary)


def test_logs_without_any_compile_end_with_5(job: Path) -> None:
    for rank in (0, 1):
        (job / LOG.format(rank)).write_text("")
    assert diagnose([job]).exit_code == 5


def test_a_job_of_which_every_compile_failed_ends_with_5_the_error_and_its_line(job: Path) -> None:
    reason = "Failed to trace print"
    for rank in (0, 1):
        log = job / LOG.format(rank)
        metrics = '"compilation_metrics": {'
        error = f'"fail_type": "Unsupported", "fail_reason": "{reason}\\n  Hint: do not", '
        log.write_text(log.read_text().replace(metrics, metrics + error))
    verdict = diagnose([job])
    assert verdict.exit_code == 5 and verdict.lead is not None and verdict.lead.line is not None
    assert verdict.lead.cause == Cause.NOTHING_COMPILED
    assert verdict.lead.line.function == "healthy"
    assert f"Unsupported: {reason}" in verdict.summary


def test_of_several_errors_the_one_that_ends_the_program_says_why_nothing_was_compiled(job: Path) -> None:
    for rank, kind in enumerate(("Unsupported", "BackendCompilerFailed")):
        log = job / LOG.format(rank)
        metrics = '"compilation_metrics": {'
        error = f'"fail_type": "{kind}", "fail_reason": "no {kind}", '
        log.write_text(log.read_text().replace(metrics, metrics + error))
    summary = diagnose([job]).summary
    assert summary.index("no BackendCompilerFailed") < summary.index("Unsupported")


def test_fewer_than_two_ranks_are_refused_with_what_to_do(job: Path) -> None:
    (job / LOG.format(1)).unlink()
    with pytest.raises(ConfigError, match=r"rank 0 .*TORCH_TRACE=DIR"):
        diagnose([job])


def test_the_one_log_of_a_job_that_had_more_ranks_names_those_that_left_none(job: Path) -> None:
    (job / LOG.format(1)).unlink()
    verdict = diagnose([job], Question(world_size=2))
    assert (verdict.exit_code, check(verdict, CheckId.LOGS_COMPLETE.text).ranks) == (6, (1,))
    assert Lack.NO_LOG.value in verdict.summary


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nope"):
        diagnose([tmp_path / "nope"])


def test_the_recorded_files_are_small_and_know_no_machine() -> None:
    texts = [path.read_text() for path in JOBS.rglob("*.log")]
    assert sum(map(len, texts)) < 650_000
    root = str(JOBS.parent.parent.parent.parent)
    assert not [word for text in texts for word in ("/root", "/home", ".venv", root) if word in text]


@pytest.mark.parametrize(("world_size", "had"), [(None, 2), (1, 2), (3, 3)])
def test_a_mesh_of_a_different_size_than_the_job_is_refused_with_both_numbers(
    job: Path, world_size: int | None, had: int
) -> None:
    mesh = parse_mesh("tp=1", "tp")
    with pytest.raises(ConfigError, match=f"mesh has 1 .*job had {had}"):
        diagnose([job], Question(mesh=mesh, world_size=world_size))
