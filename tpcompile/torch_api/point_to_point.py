"""Sends and receives of this process, with the stack of each: torch's flight recorder has those of NCCL alone.

    name                                             why
    torch.ops.c10d.{send, recv_, recv_any_source_}   the ops through which every backend sends and receives
    DispatchKey.BackendSelect                        runs before the backend; nothing of torch is registered under it
    _C._dispatch_keyset_full_after, op.redispatch    go on to the backend
    ProcessGroup.unbox, Work.unbox                   the objects behind the arguments of an op
    Work.is_completed                                with gloo, true once the program has waited for it

Seen on torch 2.11.0 and 2.13.0. `tests/torch_api/test_point_to_point.py` fails when torch moves one of them.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.torch_api import watching

_KEPT = 240
"""Posted messages that are kept: a schedule of a pipeline posts some dozens in a step."""
_OPS: dict[str, Literal["send", "recv"]] = {"send": "send", "recv_": "recv"}
_KEY = torch._C.DispatchKey.BackendSelect
_c10d = torch._C._distributed_c10d
_BATCH = dist.batch_isend_irecv.__code__


@dataclass
class Posted:
    """A send or receive that was posted."""

    op: Literal["send", "recv"]
    peer: int
    """Global rank."""
    number: int
    """Position among the messages of this op with this peer, from 1."""
    num_elements: int
    dtypes: str
    at_ns: int
    """Unix time."""
    stack: tuple[tuple[CodeType, int], ...]
    """Code and line of all frames, innermost first."""
    work: Any = None
    """torch's handle; None where it would keep memory of a GPU alive."""
    tag: int = 0
    """What gloo takes messages by; 0 on a GPU, where NCCL knows none."""
    number_of_tag: int = 0
    """Position among those with this tag, from 1; 0 where it is not known."""

    @property
    def is_on_gpu(self) -> bool:
        """True for a message that a stream sends or receives: one after the other, for each peer."""
        return self.work is None

    @property
    def has_ended(self) -> bool:
        """True once the program has waited for it; on a GPU the flight recorder knows, so this is always True."""
        return self.is_on_gpu or bool(self.work.is_completed())

    @property
    def is_in_batch(self) -> bool:
        """True for one of `batch_isend_irecv`: those of one batch have the same stack, and begin together."""
        return any(code is _BATCH for code, _ in self.stack)


class Messages:
    """Records the messages that this process posts, from `install` to `remove`. About 25 us each."""

    def __init__(self) -> None:
        self._posted: deque[Posted] = deque(maxlen=_KEPT)
        self._counts: dict[tuple[str | int, ...], int] = {}
        self._library: Any = None

    def install(self) -> None:
        """Put a function before the backends' own."""
        self._library = torch.library.Library("c10d", "IMPL")
        for name in _OPS:
            self._library.impl(name, self._before(name), "BackendSelect", with_keyset=True)

    def remove(self) -> None:
        """Take it away again."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def posted(self) -> list[Posted]:
        """The last messages, oldest first."""
        return list(self._posted)

    def _before(self, name: str) -> Callable[..., Any]:
        op, below = getattr(torch.ops.c10d, name).default, torch._C._dispatch_keyset_full_after(_KEY)

        def post(keyset: Any, tensors: Sequence[Tensor], group: Any, peer: int, *rest: Any) -> Any:
            posted = None
            with suppress(Exception):  # what only watches must not stop a message
                # First: a backend may wait for a connection.
                posted = self._keep(_OPS[name], tensors, group, peer, *rest[:1])
            work = op.redispatch(keyset & below, tensors, group, peer, *rest)
            with suppress(Exception):
                if posted is not None and all(tensor.device.type == "cpu" for tensor in tensors):
                    posted.work = _c10d.Work.unbox(work)
            return work

        return post

    def _keep(
        self, op: Literal["send", "recv"], tensors: Sequence[Tensor], group: Any, peer: int, tag: int = 0
    ) -> Posted:
        ranks = dist.get_process_group_ranks(_c10d.ProcessGroup.unbox(group))
        target = ranks[peer]
        tag = int(tag) if all(tensor.device.type == "cpu" for tensor in tensors) else 0
        posted = Posted(
            op=op,
            peer=target,
            number=self._counted(op, target),
            number_of_tag=self._counted(op, target, tag),
            tag=tag,
            num_elements=sum(tensor.numel() for tensor in tensors),
            dtypes=",".join(str(tensor.dtype).removeprefix("torch.") for tensor in tensors),
            at_ns=time.time_ns(),
            stack=tuple((frame.f_code, frame.f_lineno) for frame in watching.frames_from(sys._getframe(2))),
        )
        self._posted.append(posted)
        return posted

    def _counted(self, *of: str | int) -> int:
        self._counts[of] = self._counts.get(of, 0) + 1
        return self._counts[of]
