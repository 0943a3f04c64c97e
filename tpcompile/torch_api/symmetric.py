"""Memory of a GPU that the other ranks of a group can write; seen on torch 2.11.0 and 2.13.0.

name                                         why
distributed._symmetric_memory.empty          memory that rendezvous can map
distributed._symmetric_memory.rendezvous     collective: the same allocation of every rank, mapped here
distributed._symmetric_memory.enable_...     `enable_symm_mem_for_group`: Inductor may lower to it; deprecated in 2.13
ops.symm_mem.one_shot_all_reduce_copy        sum over the ranks by a kernel that reads the memory of all
ops.symm_mem.two_shot_all_reduce_out         the same in two steps, into memory of this rank alone
_SymmetricMemory.has_multicast_support       whether its ops may use NVLink multicast
handle.get_buffer, put_signal, wait_signal   memory of a peer as a tensor; a flag of a peer, and of this rank
_SymmetricMemory.buffer_ptrs, offset         its address for each rank, as seen from this GPU; never multicast_ptr
TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES     variable: ranks may share a GPU; see ranks.env.choose_device
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_MEET_MS = 600_000
"""Equal to the timeout of a process group; after it, the GPU of the rank that waits reports an error."""


@dataclass(frozen=True, eq=False)
class Shared:
    """Words of this rank and where the words of all ranks are."""

    words: Tensor
    addresses: list[int]
    handle: Any
    """Keeps the mappings."""


def can_share(device: torch.device) -> bool:
    """True for a GPU, into whose memory other ranks of the host can write."""
    return device.type == "cuda"


def zeros(num_words: int, *, group: Any, device: torch.device) -> Shared:
    """Collective: `num_words` of int64 on every rank, all zero before this returns on any rank."""
    import torch.distributed._symmetric_memory as symm  # without CUDA it is not there on all builds

    words = symm.empty(num_words, dtype=torch.int64, device=device)
    words.zero_()
    handle = symm.rendezvous(words, group)
    offset = getattr(handle, "offset", 0)
    meet(group, device)
    return Shared(words, [address + offset for address in handle.buffer_ptrs], handle)


def meet(group: Any, device: torch.device) -> None:
    """Collective: what any rank has launched before is done when this returns on any rank."""
    torch.cuda.synchronize(device)
    dist.barrier(group=group)
    torch.cuda.synchronize(device)


def has_multicast(device: torch.device) -> bool:
    """True where torch may use NVLink multicast; never with TORCH_SYMM_MEM_DISABLE_MULTICAST=1."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(torch.autograd.DeviceType.CUDA, device.index)


def enable(group: dist.ProcessGroup) -> None:
    """Let Inductor's lowerings use symmetric memory among the ranks of a group; newer versions need no call."""
    import torch.distributed._symmetric_memory as symm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 2.13 says that it is no longer needed
        symm.enable_symm_mem_for_group(group.group_name)


def memory(num_bytes: int, *, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Collective: `num_bytes` of uint8 on every rank, for `one_shot` and `two_shot`."""
    import torch.distributed._symmetric_memory as symm

    words = symm.empty(num_bytes, dtype=torch.uint8, device=device)
    symm.rendezvous(words, group)  # torch keeps the mappings with the memory
    return words


class PeerMemory:
    """Memory of both ranks of a pair: each writes that of the other by copy engines, which take no multiprocessor.

    Collective: both ranks make it. One thing at a time is done with it, on one stream.
    """

    def __init__(self, num_bytes: int, *, group: dist.ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symm

        self.own = symm.empty(num_bytes, dtype=torch.uint8, device=device)
        self._handle = symm.rendezvous(self.own, group)
        self._peer = 1 - group.rank()
        self._of_peer = self._handle.get_buffer(self._peer, (num_bytes,), torch.uint8)

    def push(self, x: Tensor, start: int) -> None:
        """Copy `x`, dense, into the peer's memory from byte `start` on."""
        flat = x.view(-1).view(torch.uint8)
        self._of_peer[start : start + flat.numel()].copy_(flat, non_blocking=True)

    def meet(self, channel: int) -> None:
        """Let what is queued here go on when the peer has come to the same place; what it pushed before is there."""
        self._handle.put_signal(self._peer, channel=channel, timeout_ms=_MEET_MS)
        self._handle.wait_signal(self._peer, channel=channel, timeout_ms=_MEET_MS)


def one_shot(buffer: Tensor, x: Tensor, group_name: str) -> Tensor:
    """Sum of `x` over the ranks, each of which reads the buffers of all; `buffer` is such memory as a tensor like `x`.

    One kernel copies `x` into the buffer and waits for the other ranks before and after it reads.
    """
    return torch.ops.symm_mem.one_shot_all_reduce_copy(buffer, x, "sum", group_name)


def two_shot(buffer: Tensor, out: Tensor, group_name: str) -> Tensor:
    """Sum of `buffer` over the ranks, into `out`: each rank sums its part, and reads the other parts from its peers."""
    return torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", group_name, out)
