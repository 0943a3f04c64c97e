"""Targets that draw random numbers: they are compared with the same numbers, or the run says that it cannot judge."""

from __future__ import annotations

import pytest

from tests.gate.runs import GateRun, run_many
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import CheckId, Status

TARGETS = "tests.gate.own_random"
pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GateRun]:
    plain = ["compile.backend=eager"]
    settings = {"noisy": plain, "noisy-wrong": [*plain, "wrong=yes"], "hidden": plain, "dropping": []}
    jobs = {
        name: {"target": f"{TARGETS}:{name.partition('-')[0]}", "device": "cpu", "overrides": given}
        for name, given in settings.items()
    }
    return run_many(tmp_path_factory.mktemp("random"), jobs)


def test_the_reference_in_float64_has_the_same_noise(runs: dict[str, GateRun]) -> None:
    run = runs["noisy"]
    assert run.exit_code == 0, run.judged.summary
    (check,) = [check for check in run.judged.checks if check.id == CheckId.FORWARD]
    assert check.status == Status.PASS


def test_so_a_wrong_one_is_red(runs: dict[str, GateRun]) -> None:
    run = runs["noisy-wrong"]
    assert run.exit_code == ExitCode.FAIL
    assert CheckId.FORWARD in run.failed()


def test_where_the_reference_is_not_itself_the_run_is_incomplete(runs: dict[str, GateRun]) -> None:
    run = runs["hidden"]
    assert run.exit_code == ExitCode.INCOMPLETE
    (check,) = [check for check in run.judged.checks if check.id == CheckId.FORWARD]
    assert (check.status, check.is_undecided) == (Status.SKIPPED, True)


def test_a_mask_that_compiled_code_draws_otherwise_is_no_alarm_in_a_step_that_adds_to_gradients(
    runs: dict[str, GateRun],
) -> None:
    run = runs["dropping"]
    assert run.exit_code == 0, run.judged.summary
    (check,) = [check for check in run.judged.checks if check.id == CheckId.COMPILER]
    assert check.status == Status.INFO
