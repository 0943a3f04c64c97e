"""Arguments of `tpcompile bench` that are refused before a process is started."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from typer.testing import CliRunner

from tpcompile import launch
from tpcompile.bench.__main__ import app
from tpcompile.errors import ConfigError, PreflightError


@pytest.mark.parametrize(
    ("arguments", "num_gpus", "kind", "why"),
    [
        ("--preset nope", 0, ConfigError, "unknown preset 'nope'"),
        ("--program D", 0, ConfigError, "--program D: write one of eager"),
        ("--program C --without C", 0, ConfigError, "leaves no program"),
        ("--program C --without A", 0, ConfigError, "--without A"),
        ("--nproc 3 --device cpu", 0, ConfigError, "tp=3 does not divide"),
        ("--program nowhere.py:build", 0, ConfigError, "there is no file nowhere.py"),
        ("--baseline nowhere.json", 0, ConfigError, "there is no nowhere.json"),
        ("--json nowhere/report.json", 0, ConfigError, "no folder nowhere"),
        ("--device cuda", 0, PreflightError, "no GPU here"),
        ("--nproc 4", 2, PreflightError, "4 ranks but 2 GPUs"),
        ("--preset wan14b", 0, PreflightError, "sized for GPUs"),
    ],
)
def test_it_is_one_line(
    arguments: str, num_gpus: int, kind: type[Exception], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "count_gpus", lambda: num_gpus)
    with mock.patch.dict(os.environ):
        ended = CliRunner().invoke(app, arguments.split())
    assert isinstance(ended.exception, kind), ended.output
    assert why in str(ended.exception)
    assert list(tmp_path.iterdir()) == []
