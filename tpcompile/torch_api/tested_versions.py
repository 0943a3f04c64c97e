"""torch's version -> a warning when it is a minor version that the private names here were not seen on."""

from __future__ import annotations

import os
import warnings
from typing import Any

TESTED = ("2.11", "2.13")
"""Minor versions that the tests run with, the oldest and the newest; 2.12 lies between them."""


_WARNED: dict[Any, Any] = {}
"""What was warned of in this process."""


def untested(version: str) -> str:
    """What to warn of on this version of torch; empty on one between the tested ones, whatever its patch release."""
    found = _minor(version)
    if _minor(TESTED[0]) <= found <= _minor(TESTED[1]):
        return ""
    range_ = " to ".join(TESTED)
    return (
        f"torch {version}: tpcompile was tested with torch {range_}; what it reads of torch may be missing or changed "
        "there, so check that `tpcompile gate --fault get_rank_constant` fails as it should"
    )


def is_tested_or(version: str, here: str) -> bool:
    """True for a version between the tested ones, and for one of the same minor version as `here`."""
    return not untested(version) or _minor(version) == _minor(here)


def warn_if_untested(version: str) -> None:
    """Warn once in a process, in one line, on rank 0; wherever a run starts, `tpcompile.torch_api` is imported."""
    text = untested(version)
    if text and os.environ.get("RANK", "0") == "0":
        # Not from a line of code, which would be shown as well.
        warnings.warn_explicit(text, UserWarning, filename="tpcompile", lineno=1, registry=_WARNED)


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
