"""What the server of ranks is told to run comes from this user alone."""

from __future__ import annotations

import os
import re
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.private_folders import NOBODY, WAYS, Opened, as_root
from tpcompile.private_folder import shared_folder
from tpcompile.pytest_plugin import session


def connects_as_nobody(address: str) -> bool:
    """Whether a process of a different user reaches a socket."""
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with socket.socket(socket.AF_UNIX) as found:
            os._exit(found.connect_ex(address) != 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def seen_by_all(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder that all users can reach, as /tmp; `tmp_path` is in one of this user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@as_root
def test_a_different_user_reaches_neither_end_of_a_session(seen_by_all: Path) -> None:
    held = session.Session()
    with session._bound(held.name, "server") as listener:
        listener.listen()
        for end in ("session", "server"):
            assert not connects_as_nobody(f"{held.name}/{end}")
            assert not connects_as_nobody(f"\0{held.name}-{end}")  # without a file it would have no permissions
            session._connected(held.name, end).close()
    for folder in (Path(held.name), *Path(held.name).parents[:2], Path(held.name, "session")):
        folder.chmod(0o777)
    assert connects_as_nobody(f"{held.name}/session")  # the control: it is the folders that keep it out


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of this test."""
    (tmp_path / "tmp").mkdir(mode=0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_the_path_of_the_temporary_folder_may_be_longer_than_that_of_a_socket(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / ("long" * 30)))
    held = session.Session()
    session.join(held.name).close()
    assert len(f"{held.name}/session") > 107
    session.remove(held.name)


class Config:
    """What `connect` reads of pytest's."""

    def __init__(self) -> None:
        self.stash = pytest.Stash()


@pytest.mark.parametrize("opened", WAYS)
def test_without_a_private_folder_there_are_no_ranks_and_the_reason_is_told(opened: Opened, temporary: Path) -> None:
    opened(shared_folder("pytest").parent, temporary.parent)
    config = Config()
    with session.connect(config) as running:  # type: ignore[arg-type]
        assert re.search(f"private .*{temporary.parent}", running.why_not)
    shared: dict[str, object] = {}
    session.share_with(shared, config)  # type: ignore[arg-type]
    assert not shared
