"""`tpcompile explain`: a page, the list of causes, what is not a cause."""

from __future__ import annotations

import io
import sys

import pytest

from tpcompile import cli
from tpcompile.evidence.records.causes import Cause
from tpcompile.explain import page


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tpcompile", "explain", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def test_a_pipe_gets_the_markdown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "RANK_BRANCH") == 0
    assert capsys.readouterr().out == page(Cause.RANK_BRANCH)


def test_a_terminal_gets_it_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert run(monkeypatch, "rank-branch") == 0
    shown = terminal.getvalue()
    assert "\x1b[" in shown and "rank-dependent branch" in shown
    assert "```" not in shown and "# rank" not in shown


def test_without_a_cause_all_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert rows == [[cause.slug, cause.value] for cause in Cause]


def test_what_is_no_cause_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "rank-brnach") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "rank-branch" in err
