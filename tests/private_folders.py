"""A folder that a different user could have prepared -> the ways in which it is not private to this user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to a different user")


def _foreign(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def _linked(folder: Path) -> None:
    """To a folder that is private itself: who owns the link can change where it leads."""
    target = folder.with_name("target")
    folder.rename(target)
    folder.symlink_to(target)


def _writable(folder: Path) -> None:
    folder.chmod(0o777)


def _writable_by_group(folder: Path) -> None:
    folder.chmod(0o770)


def _below_a_writable_one(folder: Path) -> None:
    folder.parent.chmod(0o777)


def _below_a_foreign_one(folder: Path) -> None:
    os.chown(folder.parent, NOBODY, NOBODY)


WAYS = [
    pytest.param(_foreign, marks=as_root, id="of a different user"),
    pytest.param(_below_a_foreign_one, marks=as_root, id="below one of a different user"),
    pytest.param(_linked, id="a link"),
    pytest.param(_writable, id="writable by all"),
    pytest.param(_writable_by_group, id="writable by a group"),
    pytest.param(_below_a_writable_one, id="below one that all can write to"),
]
Opened = Callable[[Path], None]
