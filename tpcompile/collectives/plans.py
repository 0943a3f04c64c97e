"""An eager call equal to one that passed the checks -> its plan, so that nothing is checked again.

Host time of a small collective is the number of Python steps. A plan is what the first call of a kind computed: the
options of the process group's method, or the shape of the result. It lives as long as the group object.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives.observer import active
from tpcompile.ranks.per_group import KEPT, remember
from tpcompile.torch_api.c10d import num_modes


def plan_of(x: Any, group: Any, kind: str, this: Any, that: Any = "") -> Any:
    """The plan of an equal call: same group object, dtype, kind of device, layout, `this` and `that`.

    None when no equal call was made before, when an observer or a dispatch mode is active, and when `x` is not a plain
    tensor: the caller then takes the checked path. Not for compiled code.
    """
    if type(x) is not Tensor or num_modes() or active.observer is not None:
        return None
    key = (id(group), x.dtype, x.is_cpu, x.is_cuda, x.layout, kind, this, that)
    try:
        return KEPT.get(key)
    except TypeError:  # an unhashable argument never has a plan; the checks name it
        return None


def plan_of_shape(x: Any, group: Any, kind: str, dst: str = "") -> Any:
    """`plan_of` for a collective along dim 0: its plan holds for one shape, and c10d ignores a lazy negation of `x`."""
    if type(x) is not Tensor or x.is_neg():
        return None
    return plan_of(x, group, kind, x.shape, dst)


def keep_plan(x: Tensor, group: Any, plan: Any, kind: str, this: Hashable, that: Hashable = "") -> None:
    """Let `plan_of` find `plan`; only for a real tensor on CPU or CUDA and a group passed as a ProcessGroup.

    The key holds two flags instead of the device, which is slower to compare: a group has one backend per device type.
    """
    is_on_known_device = x.is_cpu or x.is_cuda
    if x.is_complex() or not is_on_known_device:
        return
    is_real_group = type(group) is dist.ProcessGroup
    if num_modes() or not is_real_group:
        return
    remember(group, plan, x.dtype, x.is_cpu, x.is_cuda, x.layout, kind, this, that)
