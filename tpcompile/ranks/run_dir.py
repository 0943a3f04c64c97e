"""This rank's own path -> the run directory that all ranks write to.

A rank that could send a path would have the others write there. The first rank that asks sends a time with an id, or a
number: the rest of the path is each rank's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.bounds import Number
from tpcompile.evidence.rundir import free_number, new_name, new_stamp, numbered
from tpcompile.ranks.store import RankStore


class _Choice(Frozen):
    """What distinguishes the directory of this run from those of others."""

    stamp: Annotated[str, Field(pattern=r"^[0-9]{8}T[0-9]{6}-[0-9a-f]{4}$")]
    """Time and id in the name of a default directory."""
    number: Annotated[Number, Field(ge=1)]
    """Number of the first configured directory that is free."""


def agreed_job(store: RankStore) -> str:
    """Identity of the run, equal on all ranks that ask under this prefix: folders of several nodes are told by it."""
    mine = _Choice(stamp=new_stamp(), number=1)
    agreed = store.put_first("job", mine.model_dump(mode="json"), _Choice) or mine
    return agreed.stamp


def agreed_run_dir(store: RankStore, kind: str, configured: Path | str | None = None) -> Path:
    """`runs/<time>-<kind>-<id>`, or the configured path with the number of the first that is free, on all ranks alike.

    Raises PreflightError when the configured one cannot be seen.
    """
    number = 1 if configured is None else free_number(configured)
    mine = _Choice(stamp=new_stamp(), number=number)
    agreed = store.put_first("run_dir", mine.model_dump(mode="json"), _Choice) or mine
    return Path(new_name(kind, agreed.stamp)) if configured is None else numbered(configured, agreed.number)
