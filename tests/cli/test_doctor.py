"""`tpcompile doctor`: its lines, its JSON and its exit code, and one run on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.forked import PYTHONPATH
from tpcompile import cli
from tpcompile.doctor import examine as examined
from tpcompile.doctor.finding import Finding, fail, warn

FINE, LIMITED = Finding(name="python", says="3.12.3"), warn("shared memory", "64 MiB", "make it larger")
MISSING = fail("compiler", "no g++", "install one")


def run(monkeypatch: pytest.MonkeyPatch, *found: Finding, args: tuple[str, ...] = ()) -> int:
    def examine(_: object) -> Iterator[Finding]:
        yield from found

    monkeypatch.setattr(examined, "examine", examine)
    monkeypatch.setattr(sys, "argv", ["tpcompile", "doctor", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(("found", "code"), [((FINE, LIMITED), 0), ((FINE, MISSING, LIMITED), 4)])
def test_the_exit_code_is_4_where_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: tuple[Finding, ...], code: int
) -> None:
    assert run(monkeypatch, *found) == code
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == [one.level for one in found]
    assert all(one.todo in "\n".join(lines) for one in found)


def test_json_is_all_of_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FINE, MISSING, args=("--json",)) == 4
    assert [Finding.model_validate(one) for one in json.loads(capsys.readouterr().out)] == [FINE, MISSING]


@pytest.mark.slow
def test_on_this_machine_torch_answers_and_nothing_is_missing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tpcompile", "doctor", "--json"],
        capture_output=True, text=True, check=False, timeout=200, env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    found = {one["name"]: one for one in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert found["torch"]["says"].split(",")[0].partition("+")[0] == version("torch").partition("+")[0]
