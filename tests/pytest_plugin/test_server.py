"""What the process that ranks are forked from does before the first of them."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from tpcompile.pytest_plugin import server

DONE: list[str] = []


def test_a_backward_comes_before_the_users_modules_which_may_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a torch for CUDA and no GPU, a first backward after a compile starts a thread, and no rank could run one."""
    (tmp_path / "compiles_at_import.py").write_text(
        "from tests.pytest_plugin.test_server import DONE\nDONE.append('user')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        mock.patch.object(server, "_run_a_backward", side_effect=lambda: DONE.append("backward")),
        mock.patch.object(server, "_warm_up", side_effect=lambda: DONE.append("warm up") or ""),
        mock.patch.object(server, "_load_plugins"),
        mock.patch.object(server, "gc"),
    ):
        assert server._prepare(["compiles_at_import"], []) == ""
    assert DONE == ["backward", "user", "warm up"]
