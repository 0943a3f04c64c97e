"""`tpcompile gate --performance`: the benchmark after a pass, in the form of the gate, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tpcompile import cli, launch
from tpcompile.cli import bench
from tpcompile.errors import ConfigError

RAN: list[list[str]] = []


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; neither ranks nor a benchmark are started."""

    def run_bench(arguments: list[str], **_: Any) -> int:
        RAN.append(arguments)
        return 1

    RAN.clear()
    plan = SimpleNamespace(
        nproc=2, device="cpu", run_dir=Path("runs/x"), config=SimpleNamespace(preset="cpu_smoke", title="")
    )
    monkeypatch.setattr(launch, "plan", lambda request: plan)
    monkeypatch.setattr(launch, "run", lambda plan, console, **_: 0)
    monkeypatch.setattr(bench, "run_bench", run_bench)
    path = tmp_path / "performance.json"
    path.touch()
    return path


def gate(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["gate", *map(str, arguments)])


def test_after_a_pass_the_benchmark_decides_on_the_same_preset(baseline: Path) -> None:
    ended = gate(
        "--performance", baseline, "--train", "--layers", 3, "--set", "gate.error_ratio=3", "--dtype", "float64"
    )
    assert ended.exit_code == 1
    (ran,) = RAN
    assert ran == [
        "--baseline", str(baseline), "--preset", "cpu_smoke", "--nproc", "2", "--device", "cpu",
        "--logs", "runs/x/bench", "--train", "--layers", "3",
        "--set", "gate.error_ratio=3", "--set", "block.dtype=float64",
    ]  # fmt: skip


def test_a_gate_that_fails_is_not_timed(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run", lambda plan, console, **_: 5)
    assert gate("--performance", baseline).exit_code == 5
    assert RAN == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--target", "m:build"], "verify-win"),
        (["--device", "one_gpu"], "a GPU for each rank"),
        (["--performance", "nowhere.json"], "no such file"),
    ],
)
def test_what_cannot_be_timed_is_refused_before_a_rank_starts(baseline: Path, arguments: list[str], why: str) -> None:
    ended = gate("--performance", baseline, *arguments)
    assert isinstance(ended.exception, ConfigError)
    assert why in str(ended.exception)
    assert RAN == []


def test_a_rank_of_a_job_starts_no_benchmark(baseline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    ended = gate("--performance", baseline)
    assert "--nproc" in str(ended.exception)
