from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tpcompile import cli, launch
from tpcompile.cli.defaults import defaults
from tpcompile.errors import ConfigError
from tpcompile.request import GateRequest

Gate = Callable[..., tuple[int, list[GateRequest], str]]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Gate:
    """`tpcompile gate` in an empty folder: exit code, what was asked of the launcher, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, list[GateRequest], str]:
        asked: list[GateRequest] = []

        def plan(request: GateRequest) -> launch.Plan:
            asked.append(request)
            raise ConfigError("enough")

        monkeypatch.setattr(launch, "plan", plan)
        monkeypatch.setattr(sys, "argv", ["tpcompile", "gate", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), asked, capsys.readouterr().err

    return run


PROJECT = """
[project]
name = "model"
[tool.tpcompile]
nproc = 4
mode = "all"
train = true
set = ["block.seq_len=32"]
timeout-s = 60
"""


def test_a_flag_is_stronger_than_the_config_and_the_config_than_pyproject(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "gate.toml").write_text('nproc = 8\npreset = "wan14b_8"\n')
    _, (project,), _ = gate()
    assert (project.nproc, project.mode, project.train, project.timeout_s) == (4, "all", True, 60.0)
    assert project.overrides == ["block.seq_len=32"]
    _, (flag,), _ = gate("--nproc", "2", "--no-train")
    assert (flag.nproc, flag.mode, flag.train) == (2, "all", False)
    _, (config,), _ = gate("--config", "gate.toml")
    assert (config.nproc, config.preset, config.mode) == (8, "wan14b_8", "C")
    _, (both,), _ = gate("--nproc", "2", "--config", "gate.toml")
    assert (both.nproc, both.preset) == (2, "wan14b_8")


@pytest.mark.parametrize("flags", [(), ("--config", "pyproject.toml")])
def test_what_a_file_says_of_the_gate_s_own_block_is_left_out_for_a_target(
    gate: Gate, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    table = PROJECT.replace('"block.seq_len=32"', '"block.seq_len=32", "gate.steady_calls=3"')
    (tmp_path / "pyproject.toml").write_text(table + "layers = 2\npreset = 'cpu_smoke'\n")
    _, (found,), _ = gate("--target", "mine:build", *flags)
    assert found == GateRequest(target="mine:build", nproc=4, overrides=["gate.steady_calls=3"], timeout_s=60.0)
    found.config("cpu")


@pytest.mark.parametrize("flag", [("--layers", "3"), ("--mode", "all"), ("--train",), ("--preset", "cpu_smoke")])
def test_with_a_target_such_a_flag_is_an_error_that_names_it(gate: Gate, tmp_path: Path, flag: tuple[str, ...]) -> None:
    """The file says the same, and so would be left out."""
    (tmp_path / "pyproject.toml").write_text(PROJECT + "layers = 2\npreset = 'cpu_smoke'\n")
    _, (found,), _ = gate("--target", "mine:build", *flag)
    with pytest.raises(ConfigError, match=f"^{flag[0]} .*--target.*--set"):
        found.config("cpu")


def test_without_either_the_flags_have_their_own_defaults(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'model'\n")
    assert gate()[1] == [GateRequest()]


def test_a_folder_above_counts_and_a_pyproject_without_the_table_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.tpcompile]\nlayers = 2\n")
    inner = tmp_path / "src" / "model"
    inner.mkdir(parents=True)
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.ruff]\n")
    assert defaults(None, inner) == {"layers": 2}


def test_a_pyproject_that_is_named_is_read_at_its_table(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    assert defaults(tmp_path / "pyproject.toml", Path("/"))["nproc"] == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nprocs = 2", "gate.toml: unknown key 'nprocs'; choose from device, dtype, fault"),
        ("nproc = '2'", "gate.toml: nproc = '2': must be an integer"),
        ("nproc = true", "gate.toml: nproc = True: must be an integer"),
        ("mode = 'D'", "gate.toml: mode = 'D': choose from A, B, C, all"),
        ("set = 'a=1'", "gate.toml: set = 'a=1': write a list of strings"),
        ("train = 1", "gate.toml: train = 1: must be true or false"),
        ("preset = 3", "gate.toml: preset = 3: must be a string"),
        ("nproc", "gate.toml is not TOML"),
    ],
)
def test_bad_config_is_one_line_and_exit_2(gate: Gate, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "gate.toml").write_text(text)
    code, asked, err = gate("--config", "gate.toml")
    assert (code, asked) == (2, [])
    assert err.startswith(f"error: {message}") and err.count("\n") == 1


def test_an_unknown_key_of_pyproject_names_file_and_table(gate: Gate, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.tpcompile]\nnope = 1\n")
    code, _, err = gate()
    assert code == 2
    assert err.startswith(f"error: {tmp_path / 'pyproject.toml'} [tool.tpcompile]: unknown key 'nope'")


def test_a_config_that_is_missing_is_one_line(gate: Gate) -> None:
    code, _, err = gate("--config", "none.toml")
    assert (code, err.count("\n")) == (2, 1) and "none.toml" in err
