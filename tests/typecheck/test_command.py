"""`tpcompile typecheck`: exit code and finding of right and wrong targets, and of what cannot be checked."""

from __future__ import annotations

import linecache

import pytest
from typer.testing import CliRunner

from tests.forked import run_python
from tests.typecheck import targets
from tpcompile.errors import ConfigError, ExitCode, TargetRaised
from tpcompile.typecheck.__main__ import app
from tpcompile.typecheck.targets import check_target

HERE = "tests.typecheck.targets"
SHARDED = {"up.weight": "V(0)", "down.weight": "V(1)"}
FLAGS = [f"--parameter={name}={type_}" for name, type_ in SHARDED.items()]


def exit_code(*arguments: str) -> int:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False).exit_code


@pytest.mark.parametrize("name", ["right", "compiled", "by_name", "own_axis"])
def test_a_right_target_is_green_and_judged_whole(name: str) -> None:
    report = check_target(f"{HERE}:{name}")
    assert report.is_complete and not report.violations
    assert report.ranks == ((0, 1) if name == "own_axis" else (0, 3))


def test_nothing_is_computed_on_meta() -> None:
    assert check_target(f"{HERE}:right", device="meta").is_complete


@pytest.mark.parametrize(("reduce", "code"), [("true", ExitCode.PASS), ("false", ExitCode.FAIL)])
def test_types_of_parameters_are_taken_from_the_command_line(reduce: str, code: ExitCode) -> None:
    assert exit_code(f"{HERE}:plain", "--set", f"reduce={reduce}", *FLAGS) == code


def test_the_finding_of_a_wrong_target_has_its_rule_and_line() -> None:
    found = check_target(f"{HERE}:plain", ["reduce=false"], parameter_types=SHARDED).finding
    assert found is not None
    assert (found.rule, found.ranks) == ("partial-used-as-whole", (0, 3))
    assert found.site.file == targets.__file__
    assert "# fault" in linecache.getline(found.site.file, found.site.line)


def test_what_is_judged_in_part_is_not_green_and_names_no_line_of_the_command() -> None:
    report = check_target(f"{HERE}:planned", numbers=False)
    assert not report.violations and 0 < report.num_judged < report.num_ops
    assert report.not_followed_since.endswith(" in 0 (Linear)")
    assert exit_code(f"{HERE}:planned", "--no-numbers") == ExitCode.INCOMPLETE
    assert exit_code(f"{HERE}:planned") == ExitCode.PASS


def test_nothing_to_judge_is_never_green() -> None:
    assert exit_code(f"{HERE}:idle") == ExitCode.NOTHING_COMPILED


@pytest.mark.parametrize(
    ("name", "settings", "types"),
    [
        ("function", (), {}),
        ("nowhere", (), {}),
        ("own_axis", ("axis=nowhere",), {}),
        ("right", (), {"parameter_types": {"nowhere": "V(0)"}}),
        ("right", (), {"output_type": "Q"}),
        ("right", (), {"input_types": ("I", "I")}),
    ],
)
def test_what_cannot_be_checked_is_a_mistake_of_the_user(
    name: str, settings: tuple[str, ...], types: dict[str, object]
) -> None:
    with pytest.raises(ConfigError):
        check_target(f"{HERE}:{name}", settings, **types)  # type: ignore[arg-type]


def test_an_exception_of_the_target_is_not_taken_for_a_bug_of_ours() -> None:
    with pytest.raises(TargetRaised) as raised:
        check_target(f"{HERE}:raises")
    assert isinstance(raised.value.__cause__, LookupError)


def test_bad_input_is_one_line_and_exit_code_2() -> None:
    ended = run_python(["-m", "tpcompile", "typecheck", f"{HERE}:right", "--parameter", "up"])
    assert (ended.returncode, ended.stdout) == (ExitCode.USAGE, "")
    assert len(ended.stderr.splitlines()) == 1
