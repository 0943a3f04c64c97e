"""What GitHub is told about several failed tests, without ranks."""

from types import SimpleNamespace

from tpcompile.pytest_plugin import github
from tpcompile.pytest_plugin.github import Note


def _report(*errors: str) -> SimpleNamespace:
    return SimpleNamespace(tp_github=vars(Note(errors, "")))


def test_the_first_line_of_each_test_comes_before_a_second_one_of_any() -> None:
    reports = [_report(f"first {n}", f"second {n}") for n in range(9)]
    assert github.write(reports, {}) == [f"first {n}" for n in range(9)] + ["second 0"]


def test_a_line_that_two_tests_share_is_told_once() -> None:
    assert github.write([_report("same"), SimpleNamespace(), _report("same", "other")], {}) == ["same", "other"]
