"""The pytest plugin, on sessions of a user: what fails on ranks is named once per cause, what is right is green."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH, ROOT
from tests.pytest_plugin.session import Session, line_of, run_session, source
from tpcompile.pytest_plugin import session

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step summary of GitHub Actions."""
    return tmp_path_factory.mktemp("actions") / "summary.md"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, summary: Path) -> Session:
    folder = tmp_path_factory.mktemp("faulty")
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(folder)}
    return run_session(folder, {"faulty": source("faulty"), "uneven": UNEVEN}, environ=environ, is_forked=True)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Session:
    files = {"healthy": source("healthy"), "documented": documented()}
    return run_session(tmp_path_factory.mktemp("healthy"), files, "-n", "2", "-ra", is_forked=True)


def documented() -> str:
    """The example of docs/pytest.md with the marker."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pytest.md").read_text(), re.DOTALL)
    (example,) = [block for block in blocks if "@pytest.mark.tp" in block]
    return str(example)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("rank_constant", ["rank-dependent constant: mul(%0, 1) / mul(%0, 2)", line_of("faulty", "rank constant")]),
        ("break_on_one_rank", ["graph break", "on rank 1 only (rank 1)", line_of("faulty", "break")]),
        ("dtype", ["x: dtype float32 / float64", line_of("faulty", "dtype")]),
        ("missing_collective", ["all_reduce(reduce_op=sum", "on rank 0 only", line_of("faulty", "missing")]),
        ("layout", ["is_odd == False / True", line_of("faulty", "layout")]),
        (
            "recompile",
            ["recompiles: expected 0, found 1 on ranks 0-1", "self.count == 0", line_of("faulty", "recompile")],
        ),
        (
            "breaks",
            [
                "ranks 0-1: ",
                "graphs: expected 1, found 2 on ranks 0-1",
                "breaks: expected 0, found 1 on ranks 0-1",
                line_of("faulty", "breaks"),
            ],
        ),
        ("fewer_breaks_than_expected", ["breaks: expected 1, found 0 on ranks 0-1"]),
        ("assertion_on_one_rank", ["rank 1: assert 1 == 0", line_of("faulty", "one rank")]),
        ("assertion_on_all_ranks", ["ranks 0-1: assert 0 == 5", line_of("faulty", "all ranks")]),
        ("raises_while_the_other_waits", ["rank 1: ValueError: planted"]),
        ("dies", ["rank 1 died with exit code 3 in the call of the test"]),
        ("is_killed", ["rank 1 was killed by SIGSEGV in the call of the test"]),
        ("fixture", ["rank 1: ValueError: planted in a fixture"]),
        ("end_of_a_fixture", ["rank 1: AssertionError: planted in the end of a fixture"]),
        ("breakpoint", ["ranks 0-1: RuntimeError: breakpoint() on rank 0: the ranks of a test have no terminal"]),
    ],
)
def test_a_fault_is_one_failure_that_names_rank_cause_and_line(faulty: Session, name: str, texts: list[str]) -> None:
    (failure,) = faulty.cases[f"test_{name}"].failures
    for text in texts:
        assert text in failure


FIVE = {
    "rank_constant": "rank constant", "break_on_one_rank": "break", "dtype": "dtype", "missing_collective": "missing",
    "layout": "layout",
}  # fmt: skip


@pytest.mark.parametrize("name", FIVE)
def test_in_actions_the_line_of_the_user_is_annotated_and_the_summary_has_the_test(
    faulty: Session, summary: Path, name: str
) -> None:
    file, _, line = line_of("faulty", FIVE[name]).partition(":")
    assert f"\n::error file={file},line={line}," in faulty.output
    text = summary.read_text().replace("\\", "")
    (section,) = [part for part in text.split("\n## ") if part.startswith((f"test_{name} [", f"## test_{name} ["))]
    assert f"{file}:{line}" in section


def test_in_actions_a_failed_assertion_is_annotated_at_its_line(faulty: Session) -> None:
    file, _, line = line_of("faulty", "one rank").partition(":")
    assert f"\n::error file={file},line={line}," in faulty.output


@pytest.mark.usefixtures("faulty")
def test_in_actions_ranks_write_no_section_of_the_summary(summary: Path) -> None:
    titles = re.findall("^## (.*)", summary.read_text().replace("\\", ""), re.MULTILINE)
    assert [title for title in titles if not title.startswith("test_")] == []


def test_in_actions_under_xdist_annotations_and_summary_are_the_same(tmp_path: Path) -> None:
    """Written by the session that has the workers, once."""
    found = tmp_path / "summary.md"
    environ = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(found), "GITHUB_WORKSPACE": str(tmp_path)}
    chosen = ("rank_constant", "missing_collective")
    options = ("-n", "2", "-k", " or ".join(chosen))
    session = run_session(tmp_path, {"faulty": source("faulty")}, *options, environ=environ, is_forked=True)
    lines = [line_of("faulty", FIVE[name]).partition(":")[2] for name in chosen]
    places = re.findall(r"^::error file=test_faulty.py,line=(\d+),", session.output, re.MULTILINE)
    assert set(lines) < set(places) and len(places) == 3, "where the ranks parted, and where a collective is missing"
    titles = re.findall(r"^## test_(\w+)", found.read_text().replace("\\", ""), re.MULTILINE)
    assert sorted(titles) == sorted(chosen)


def test_in_actions_there_are_ten_annotations_at_most_and_none_from_a_rank(faulty: Session) -> None:
    assert len(re.findall(r"^::error", faulty.output, re.MULTILINE)) == 10


def test_every_test_of_the_session_with_faults_fails(faulty: Session) -> None:
    names = re.findall(r"^def (test_\w+)", source("faulty") + UNEVEN, re.MULTILINE)
    assert {name for name, case in faulty.cases.items() if case.failures} == set(names)
    assert faulty.returncode == pytest.ExitCode.TESTS_FAILED


def test_two_causes_are_two_failures(faulty: Session) -> None:
    first, second = faulty.cases["test_two_causes"].failures
    assert re.match("rank 0: ValueError: .*rank 0", first)
    assert re.match("rank 1: KeyError: .*rank 1", second)


def test_a_failure_comes_with_the_output_of_its_ranks_only(faulty: Session) -> None:
    output = faulty.cases["test_assertion_on_one_rank"].output
    assert "printed by rank 1" in output and "printed by rank 0" not in output


def test_the_trace_of_torch_is_not_in_the_captured_log(faulty: Session) -> None:
    assert "torch.__trace" not in faulty.output


def test_the_output_of_a_rank_that_died_is_kept(faulty: Session) -> None:
    assert "last words of rank 1" in faulty.output
    assert line_of("faulty", "killed").replace(":", '", line ') in faulty.output  # of the fault handler


def test_a_rank_that_waits_for_one_that_failed_is_stopped_and_its_line_is_noted(faulty: Session) -> None:
    note = rf"Rank 0 had not finished and was stopped, at \S*{line_of('faulty', 'waits')} in"
    assert re.search(note, faulty.output)
    assert faulty.cases["test_raises_while_the_other_waits"].time_s < 60


def test_ranks_that_hang_are_named_with_the_lines_at_which_they_stand(faulty: Session) -> None:
    (failure,) = faulty.cases["test_hangs"].failures
    assert re.search("ranks 0-1 .*not finish", failure)
    assert re.search(rf"rank 0 is at \S*{line_of('faulty', 'hangs')} in test_hangs", failure)
    assert re.search(rf"rank 1 is at \S*{line_of('faulty', 'sleeps')} in test_hangs", failure)


def test_ranks_in_different_collectives_are_named_with_both_lines(faulty: Session) -> None:
    (failure,) = faulty.cases["test_waits_in_different_collectives"].failures
    assert re.search(rf"rank 0 is at \S*{line_of('faulty', 'only rank 0')}", failure)
    assert re.search(rf"rank 1 is at \S*{line_of('faulty', 'barrier')}", failure)


def test_right_tests_are_green_under_xdist(healthy: Session) -> None:
    assert healthy.returncode == 0, healthy.output
    assert not [case for case in healthy.cases.values() if case.failures]
    names = re.findall(r"def (test_\w+)", source("healthy") + documented())
    assert {name.partition("[")[0] for name in healthy.cases} == set(names)


def test_parameters_and_fixtures_with_parameters_run_in_the_ranks(healthy: Session) -> None:
    assert {"test_parametrised[a b-1.0]", "test_parametrised[[c::d]-2.0]"} <= healthy.cases.keys()
    assert "test_fixture_with_collectives[2]" in healthy.cases


def test_a_skip_names_the_ranks_unless_all_skip(healthy: Session) -> None:
    assert healthy.cases["test_skipped"].skipped.endswith("all ranks")
    assert re.match("rank 1: .*nothing", healthy.cases["test_skipped_on_one_rank"].skipped)


def test_a_rank_that_fails_or_dies_as_expected_is_no_failure(healthy: Session) -> None:
    assert healthy.cases["test_expected_to_fail_on_one_rank"].skipped == "known"
    assert healthy.cases["test_expected_to_die"].skipped == "known to die"


ONE = """
import pytest

@pytest.mark.tp(world_size=2)
def test_on_ranks(tp):
    print("hello from", tp.rank)

def test_without_marker(tp):
    pass

@pytest.mark.tp(world_size=2)
def test_not_selected(tp):
    assert False
"""


def test_output_is_shown_with_s_and_pdb_has_a_line_of_its_own(tmp_path: Path) -> None:
    done = run_session(tmp_path, {"one": ONE}, "-s", "--pdb", "-k", "on_ranks", is_forked=True)
    assert done.returncode == 0, done.output
    assert "[rank 0] hello from 0" in done.output and "[rank 1] hello from 1" in done.output
    assert "--pdb and --trace" in done.output
    assert list(done.cases) == ["test_on_ranks"]


def test_the_fixture_without_the_marker_says_what_is_missing(tmp_path: Path) -> None:
    done = run_session(tmp_path, {"one": ONE}, "-k", "without_marker", is_forked=True)
    (failure,) = done.cases["test_without_marker"].failures
    assert "@pytest.mark.tp(world_size=2)" in failure


OLD_TORCH = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "2.10.0" if name == "torch" else version(name)
"""
NO_FORK = "import os; del os.fork"
OWN_PATH = """
import sys
sys.path.insert(0, __file__.rpartition("/")[0])
"""
LACKS_GLOO = "import torch.distributed as dist; dist.is_gloo_available = lambda: False"


IS_INSTALLED = any(importlib.metadata.distributions(name="tpcompile"))
NEEDS_METADATA = pytest.mark.skipif(not IS_INSTALLED, reason="tpcompile is not installed: its requirements are unknown")


@pytest.mark.parametrize(
    ("conftest", "why"),
    [
        pytest.param(OLD_TORCH, "torch 2.10.0 is not in the range", marks=NEEDS_METADATA),
        (NO_FORK, "this platform has no fork"),
    ],
)
def test_what_cannot_be_checked_is_skipped_with_the_reason(tmp_path: Path, conftest: str, why: str) -> None:
    done = run_session(tmp_path, {"one": ONE, "conftest": conftest}, "-k", "on_ranks", is_forked=True)
    assert done.returncode == 0, done.output
    assert f"not checked: {why}" in done.cases["test_on_ranks"].skipped


def test_a_torch_without_gloo_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "lacks_gloo.py").write_text(LACKS_GLOO)
    files, options = {"one": ONE, "conftest": OWN_PATH}, ("-k", "on_ranks", "-o", "tp_preload=lacks_gloo")
    done = run_session(tmp_path, files, *options, is_forked=True)
    assert re.fullmatch("not checked: .*gloo", done.cases["test_on_ranks"].skipped)


def test_with_tp_require_what_cannot_be_checked_fails(tmp_path: Path) -> None:
    files = {"one": ONE, "conftest": NO_FORK}
    done = run_session(tmp_path, files, "-k", "on_ranks", "--tp-require", is_forked=True)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    (failure,) = done.cases["test_on_ranks"].failures
    assert re.search("not checked: .*fork", failure)


UNEVEN = """
import os
import pytest
if os.environ.get("RANK") == "1":
    raise RuntimeError("planted at import")

@pytest.mark.tp(world_size=2)
def test_on_ranks(tp):
    pass
"""


def test_a_file_that_one_rank_cannot_import_names_the_rank(faulty: Session) -> None:
    (failure,) = faulty.cases["test_on_ranks"].failures
    assert "rank 1" in failure and "planted at import" in failure


def test_importing_the_plugin_imports_no_torch() -> None:
    code = "import sys, tpcompile.pytest_plugin; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


def test_it_is_registered_under_the_name_of_its_module() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    assert entry_points == {"tpcompile.pytest_plugin": "tpcompile.pytest_plugin"}


@NEEDS_METADATA
@pytest.mark.parametrize(("version", "is_known"), [("2.10.0", False), ("2.11.0", True), ("2.13.0+cpu", True)])
def test_the_range_of_torch_is_that_of_the_package(version: str, is_known: bool) -> None:
    """A version that is too new is a warning where torch is imported."""
    assert (session._out_of_range(version) == "") == is_known
