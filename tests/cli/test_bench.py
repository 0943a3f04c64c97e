"""`tpcompile bench`: an interrupt is one line."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tpcompile import process_tree
from tpcompile.cli.bench import run_bench
from tpcompile.process_tree import Outcome


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (0, 0)])
def test_what_ranks_print_once_they_are_stopped_is_not_shown(
    signum: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "eager is compiled"

    def run_tree(*_: Any, on_line: Callable[[str], None], on_signal: Callable[[], None], **__: Any) -> Outcome:
        on_line(before)
        if signum:
            on_signal()
        on_line("KeyboardInterrupt")
        return Outcome(exit_code=code, signal=signum)

    monkeypatch.setattr(process_tree, "run_tree", run_tree)
    assert run_bench([]) == code
    last = "stopped by SIGINT" if signum else "KeyboardInterrupt"
    assert capsys.readouterr().err.splitlines() == [before, last]
