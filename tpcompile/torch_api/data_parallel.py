"""FSDP2 and DDP on tensors that hold nothing, among ranks that do not exist: torch 2.11.0 and 2.13.0.

    name                                               why
    _fully_shard._get_device_from_mesh                 a mesh of the CPU, and parameters on meta
    torch.meta                                         the module of a device, which FSDP looks for
    FSDPParamGroup._validate_no_meta_params            refuses parameters on meta
    parallel.distributed._verify_param_shape_...       reads what the ranks have sent
    DistributedDataParallel.__init__, .reducer         sums nothing: the work of a fake group has no result

`tests/torch_api/test_data_parallel.py` fails when one of them moves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp


@contextmanager
def on_empty_tensors(device: torch.device) -> Iterator[None]:
    """Let FSDP2 and DDP take parameters on `device`, meta or one that is not there."""
    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(ddp, "_verify_param_shape_across_processes", lambda *_, **__: None))
        stack.enter_context(patch(DistributedDataParallel, "__init__", _with_hook(DistributedDataParallel.__init__)))
        if device.type == "meta":
            group = _fsdp_param_group.FSDPParamGroup
            stack.enter_context(patch(group, "_validate_no_meta_params", lambda self: None))
            stack.enter_context(patch(_fully_shard, "_get_device_from_mesh", lambda mesh: device))
            stack.enter_context(patch(torch, "meta", torch.cpu, create=True))
        yield


def _with_hook(real: Any) -> Any:
    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.register_comm_hook(None, lambda state, bucket: _unreduced(bucket))  # annotations would be checked
        self.reducer = _Reducer(self.reducer)

    return init


class _Reducer:
    """A reducer whose buckets stay as they were first made: the ranks would agree on others, and read their order."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _unreduced(bucket: Any) -> Any:
    """The gradients of this rank, at once."""
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
