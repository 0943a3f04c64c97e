"""Custom ops and Triton kernels that are called in eager -> FastPathError for each that may not run on a shard."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tpcompile.errors import FastPathError
from tpcompile.evidence.records import UserLine, value_item
from tpcompile.evidence.text.lines import innermost, lines_of, of_program
from tpcompile.fastpath.ban import refusal
from tpcompile.fastpath.registry import tp_region
from tpcompile.fastpath.source import kernel_name, line_of, python_function
from tpcompile.fastpath.use import IN_EAGER, Use, is_torchs_op, replaced_kernel
from tpcompile.torch_api import registrations
from tpcompile.torch_api.dispatch import TorchDispatchMode
from tpcompile.torch_api.kernels import launches_seen

_CLOSES = "tpcompile.fastpath.kernels.closing.close_kernel"
"""Launched for a call that was refused; it computes nothing."""


@contextmanager
def ban_in_eager(size: int, *, tp_aware: Iterable[str] = ()) -> Iterator[None]:
    """`tp_region(size)` in which custom ops and Triton kernels that are not TP-aware nor listed raise FastPathError.

    As the gate refuses them in compiled graphs, before they run; with one rank nothing. A kernel that an op launches is
    part of the op. For tests and debugging: every op in eager goes through Python, 5.3 us instead of 0.8 for an add of
    4 numbers (CPU, torch 2.13), and kernels are seen in all threads of the process. Compiled code stays compiled.
    """
    with tp_region(size):
        if size == 1:
            yield
            return
        ban = _Ban(size, frozenset({*tp_aware, _CLOSES}))
        with launches_seen(ban.check_launch), ban:
            yield


class _Ban(TorchDispatchMode):
    def __init__(self, size: int, tp_aware: frozenset[str]) -> None:
        super().__init__()
        self._size, self._tp_aware = size, tp_aware
        self._is_custom: dict[Any, bool] = {}
        """Ops that may run -> False for those of torch."""
        self._num_ops = 0
        """Custom ops that run now."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: below a mode that does not say so, Dynamo compiles nothing."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._is_custom:
            self._is_custom[func] = self._judge(func)
        num_custom = int(self._is_custom[func])
        self._num_ops += num_custom
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._num_ops -= num_custom

    def _judge(self, op: Any) -> bool:
        """Raise FastPathError for an op or kernel of others that may not run on a shard; True for an op of others."""
        whole_name, _, _ = op.name().partition(".")
        namespace, _, name = whole_name.partition("::")
        if not is_torchs_op(namespace, name, op._overloadname):
            self._check(Use(value_item(whole_name, "in eager")), "called")
            return True
        for key, place in registrations.replaced_kernels(op.name()):
            self._check(Use(replaced_kernel(op.name(), key, place)), "called")
        return False

    def check_launch(self, kernel: Any) -> None:
        """Raise FastPathError for a Triton kernel that is launched outside of any op, unless it may run on a shard."""
        function = python_function(kernel)
        if self._num_ops or function is None:
            return
        item = value_item(kernel_name(function), "in eager")
        item = item.model_copy(update={"notes": {"graph": IN_EAGER}})
        stack = tuple(lines_of(traceback.extract_stack()))
        self._check(Use(item, stack), "launched", line_of(function))

    def _check(self, use: Use, done: str, kernel: UserLine | None = None) -> None:
        why = refusal(use, self._tp_aware, tp_size=self._size)
        if not why:
            return
        stack = lines_of(traceback.extract_stack())
        line = use.line or of_program(stack) or innermost(stack)
        defined = kernel or use.defined_at({})
        raise FastPathError(
            f"{use.name} was {done} at {line} where tensors are shards of {self._size} ranks, and {why}; "
            f"it is defined at {defined}"
        )
