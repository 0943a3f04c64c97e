"""The end of a process group -> what must be done before; seen on torch 2.11.0 and 2.13.0.

    name                                  why
    ProcessGroup.shutdown                 what destroy_process_group calls for each group, however it was imported
    ProcessGroup.abort                    the same for groups that are given up

`tests/torch_api/test_teardown.py` fails when torch ends a group by a different way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_ENDS = ("shutdown", "abort")
"""Methods of a process group that end it."""


def before_shutdown(act: Callable[[], object]) -> Callable[[], None]:
    """Call `act` before a group of this process shuts down or is aborted; returns what undoes it."""
    before = {name: vars(dist.ProcessGroup)[name] for name in _ENDS}  # getattr would lose how it binds
    for name in _ENDS:
        setattr(dist.ProcessGroup, name, _preceded(getattr(dist.ProcessGroup, name), act))

    def undo() -> None:
        for name, end in before.items():
            setattr(dist.ProcessGroup, name, end)

    return undo


def _preceded(end: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(end)
    def acts_and_ends(*args: Any, **kwargs: Any) -> Any:
        act()
        return end(*args, **kwargs)

    return acts_and_ends
