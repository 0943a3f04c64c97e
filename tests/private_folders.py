"""A folder that a different user could have prepared -> the ways in which it is not private to this user."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
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


def _only_within(way: Callable[[Path], None], folder: Path, within: Path) -> None:
    """Refuses a folder outside of the test's own: a broken path must not open a folder of the machine."""
    assert within in folder.parent.parents, f"{folder} is not two levels below {within}"
    way(folder)


_WAYS = {
    "of a different user": (_foreign, [as_root]),
    "below one of a different user": (_below_a_foreign_one, [as_root]),
    "a link": (_linked, []),
    "writable by all": (_writable, []),
    "writable by a group": (_writable_by_group, []),
    "below one that all can write to": (_below_a_writable_one, []),
}
Opened = Callable[[Path, Path], None]
"""(folder, folder of the test) -> other users can put something into the first."""
WAYS = [pytest.param(partial(_only_within, way), marks=marks, id=name) for name, (way, marks) in _WAYS.items()]
