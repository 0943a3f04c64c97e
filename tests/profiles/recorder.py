"""Stands for CUDA graphs on a machine without them: a replay calls what was captured, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api.dispatch import tree_flatten


class Replayed:
    """As a CUDA graph: it reads its own buffers, and always writes the same outputs."""

    def __init__(self, call: Callable[[], Any], outputs: Any) -> None:
        self.call, self.outputs = call, outputs
        self.is_live = True

    def replay(self) -> None:
        assert self.is_live, "a graph that was released is replayed"
        for old, new in zip(tensors_of(self.outputs), tensors_of(self.call()), strict=True):
            old.copy_(new)

    def release(self) -> None:
        self.is_live = False


class Recorder:
    """Counts what is asked of it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.graphs: list[Replayed] = []
        self.num_warm_ups = self.num_finished = 0

    def warm_up(self, call: Callable[[], Any], times: int) -> Any:
        self.num_warm_ups += times
        return [call() for _ in range(times)][-1]

    def capture(self, call: Callable[[], Any]) -> tuple[Replayed, Any]:
        outputs = call()
        self.graphs.append(Replayed(call, outputs))
        return self.graphs[-1], outputs

    def finish(self) -> None:
        self.num_finished += 1


def tensors_of(value: Any) -> list[Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
