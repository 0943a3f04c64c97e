"""An eager call found valid before, without gradient -> its plan, so that nothing is checked again.

Host time of a small collective is the number of Python steps. A plan is what the first call of a kind worked out: the
options of the process group's method, the shape of the result. It lives as long as the group object.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

import torch.distributed as dist
from torch import Tensor, is_grad_enabled

from tpcompile.torch_api.c10d import num_modes
from tpcompile.collectives.observer import active

_MAX_PLANS = 4096
# One flat dictionary by the group's id: a second lookup, or asking a weak reference, would cost at every call.
_PLANS: dict[tuple[Any, ...], Any] = {}
_GROUPS: dict[int, weakref.ref[Any]] = {}


def plan_of(x: Any, group: Any, kind: str, this: Any, that: Any = None) -> Any:
    """The plan of an equal call: same group object, dtype, kind of device, layout and details.

    None where there is none, under a gradient, an observer or a dispatch mode, and for what is no plain tensor: check,
    and work it out. Compiled code must not get here.
    """
    if type(x) is not Tensor or num_modes() or active.observer is not None:
        return None
    if x.requires_grad and is_grad_enabled():
        return None
    try:
        return _PLANS.get((id(group), x.dtype, x.is_cpu, x.is_cuda, x.layout, kind, this, that))
    except TypeError:  # unhashable, so never kept: the checks say what is wrong with it
        return None


def keep_plan(x: Tensor, group: Any, plan: Any, kind: str, this: Hashable, that: Hashable = None) -> None:
    """Let `plan_of` find `plan`. Not for complex tensors, which travel as real ones, nor other spellings of a group.

    A group has its backend by kind of device, so two flags do: a device is slower to compare. Other kinds get no plan.
    """
    if not num_modes() and type(group) is dist.ProcessGroup and not x.is_complex() and (x.is_cpu or x.is_cuda):
        remember(group, plan, x.dtype, x.is_cpu, x.is_cuda, x.layout, kind, this, that)


def recall(group: dist.ProcessGroup, *what: Hashable) -> Any:
    """What was given to `remember` for this group, else None."""
    return _PLANS.get((id(group), *what))


def remember(group: dist.ProcessGroup, plan: Any, *what: Hashable) -> None:
    """Keep something until the group's object dies: from then on another object may have its id."""
    key = id(group)
    if key not in _GROUPS:
        _GROUPS[key] = weakref.ref(group, lambda _: _forget(key))
    if len(_PLANS) >= _MAX_PLANS:  # ever new shapes: forget all, so that neither memory grows nor calls stay slow
        _PLANS.clear()
    _PLANS[key, *what] = plan


def _forget(key: int) -> None:
    del _GROUPS[key]
    for plan in [plan for plan in _PLANS if plan[0] == key]:
        del _PLANS[plan]
