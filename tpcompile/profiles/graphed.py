"""Calls of a program -> replays of the CUDA graph of their signature, which the first such call captures."""

from __future__ import annotations

import atexit
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.errors import ConfigError, TpCompileError
from tpcompile.profiles.cuda_graphs import CudaGraph, CudaGraphs
from tpcompile.profiles.gradients import Gradients
from tpcompile.profiles.signature import (
    Key,
    Leaf,
    buffer_for,
    check_arguments,
    copy_into,
    filled,
    key_of,
    leaves_of,
    text_of,
)
from tpcompile.profiles.steps import Steps
from tpcompile.sink import Sink
from tpcompile.torch_api.c10d import before_shutdown
from tpcompile.torch_api.dispatch import tree_flatten, tree_unflatten

logger = Sink("profiles")
WARM_UPS = 3
"""Calls before a capture: the first compiles, and kernels that are tuned at their first launch are tuned."""


@dataclass(frozen=True)
class _Captured:
    graph: CudaGraph
    inputs: list[Any]
    """Tensors that it reads, in the order of the arguments; constants and static tensors are kept alive."""
    copied: list[tuple[int, Tensor]]
    """Number of a value, and the buffer that it is copied to."""
    outputs: Any


class Graphed:
    """Replays one CUDA graph per signature of its calls: shapes, strides, dtypes, devices, constants, modes.

    `modules` are those that the program calls.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        recorder: CudaGraphs,
        *,
        label: str,
        ranks: Steps,
        modules: tuple[nn.Module, ...] = (),
        static: Collection[int | str] = (),
        clone_outputs: bool = False,
        max_graphs: int = 8,
    ) -> None:
        self._program, self._recorder, self._label, self._ranks = program, recorder, label, ranks
        self._modules = modules
        self._static, self._clone_outputs, self._max_graphs = frozenset(static), clone_outputs, max_graphs
        self._live: OrderedDict[Key, _Captured] = OrderedDict()
        """The least recently used first."""
        self.num_captures = self.num_replays = 0
        _release_at_shutdown()
        _HOLDERS.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of `program(*args, **kwargs)`: the same tensors at every call with this signature."""
        leaves = leaves_of(args, kwargs, self._static)
        training = tuple(module.training for module in self._modules)
        key = key_of(leaves, training)
        captured = self._live.get(key)
        if captured is None:
            captured = self._live[key] = self._capture(args, kwargs, leaves, training)
        else:
            self._live.move_to_end(key)
        with torch.no_grad():
            for number, buffer in captured.copied:
                copy_into(buffer, leaves[number].value)
        captured.graph.replay()
        self.num_replays += 1
        if not self._clone_outputs:
            return captured.outputs
        leaves_out, spec = tree_flatten(captured.outputs)
        return tree_unflatten([each.clone() if isinstance(each, Tensor) else each for each in leaves_out], spec)

    def release(self) -> None:
        """Free all graphs, once their replays have ended; the next call captures again."""
        if not self._live:
            return
        self._recorder.finish()
        while self._live:
            self._live.popitem()[1].graph.release()

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Leaf], training: tuple[bool, ...]
    ) -> _Captured:
        check_arguments(leaves, self._label, self._recorder.device)
        self._ranks.capture(text_of(leaves, training))
        self._make_room()
        inputs = [buffer_for(leaf) for leaf in leaves]
        copied = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf.value, Tensor) and not leaf.is_static:
                copied.append((number, inputs[number]))
        own_args, own_kwargs = filled(args, kwargs, inputs)

        def call() -> Any:
            return self._program(*own_args, **own_kwargs)

        made, failure = self._recorded(call, leaves, copied)
        problem = "" if failure is None else str(failure).strip().partition("\n")[0]
        if failure is not None and not isinstance(failure, ConfigError):
            problem = f"{self._label} cannot be captured: {problem}"
        try:
            self._ranks.captured(problem)
        except TpCompileError as error:
            if made is not None:
                made[0].release()
            raise error from failure
        assert made is not None, "no rank has a failure"
        self.num_captures += 1
        return _Captured(made[0], inputs, copied, made[1])

    def _recorded(
        self, call: Callable[[], Any], leaves: list[Leaf], copied: list[tuple[int, Tensor]]
    ) -> tuple[tuple[CudaGraph, Any] | None, Exception | None]:
        """The graph and its outputs, and why it cannot be used, which the other ranks must know before they replay."""
        gradients = Gradients(self._modules, self._label)
        if any(
            isinstance(each, Tensor) and each.requires_grad
            for each in tree_flatten(self._recorder.warm_up(call, WARM_UPS))[0]
        ):
            raise ConfigError(
                f"{self._label} returns a tensor that requires grad, and a CUDA graph of the forward alone has no "
                "backward; call it under torch.no_grad(), or run a function with the whole step, backward included"
            )
        self._check_inputs(leaves, copied)
        gradients.restore()
        made = None
        try:
            made = self._recorder.capture(call)
            gradients.check()
        except (ConfigError, RuntimeError) as error:  # CUDA raises RuntimeError for what a capture does not allow
            return made, error
        return made, None

    def _make_room(self) -> None:
        if len(self._live) < self._max_graphs:
            return
        logger.warning(
            "{}: capture {} with {} graphs alive, the least recently used one goes; pass numbers that change as "
            "tensors, or raise max_graphs", self._label, self.num_captures + 1, len(self._live),
        )  # fmt: skip
        self._recorder.finish()
        self._live.popitem(last=False)[1].graph.release()

    def _check_inputs(self, leaves: list[Leaf], copied: list[tuple[int, Tensor]]) -> None:
        for number, buffer in copied:
            leaf = leaves[number]
            if buffer.grad is not None:
                raise ConfigError(
                    f"{self._label} leaves a gradient in argument {leaf.where}, and a CUDA graph has a copy of it; "
                    "return the gradient, as torch.autograd.grad does"
                )
            own, given = buffer.detach(), leaf.value.detach()
            is_same = torch.equal(own, given) or torch.equal(own.nan_to_num(), given.nan_to_num())  # NaN is not equal
            if not is_same:
                raise ConfigError(
                    f"{self._label} writes argument {leaf.where} in place, and a CUDA graph has a copy of it; keep "
                    f"it as a buffer of the module, or pass static=({leaf.argument!r},)"
                )


_HOLDERS: weakref.WeakSet[Graphed] = weakref.WeakSet()


def release_all() -> None:
    """Release the graphs of all holders; an error of a lost device must not stop the process from ending."""
    for holder in list(_HOLDERS):
        try:
            holder.release()
        except RuntimeError as error:
            logger.warning("a CUDA graph could not be released: {}", error)


@cache
def _release_at_shutdown() -> None:
    """Release all graphs before a process group ends, and before Python does, in a process that has some.

    A graph that captured NCCL collectives keeps the communicator: `destroy_process_group` would wait for it for ever,
    and so would the end of the process.
    """
    before_shutdown(release_all)
    atexit.register(release_all)
