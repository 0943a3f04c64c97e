"""Lines of a program that cut a gradient off, and a run without one of them.

`detach`, `.data` and `no_grad` are meant or a mistake: which, only the gradients of the run without them say.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tpcompile.evidence.records import MistakeKind, UserLine, WrongOp
from tpcompile.evidence.text.lines import is_library_file, line_of_frame
from tpcompile.numerics.callers import follows_run
from tpcompile.torch_api.dispatch import SET_GRAD_ENABLED

_DETACHED = {
    Tensor.detach: "detach", torch.detach: "detach", Tensor.data.__get__: "data", Tensor.detach_: "detach",
}  # type: ignore[attr-defined]  # fmt: skip
_OF_TORCH = ("/torch/autograd/grad_mode.py", "/torch/utils/_contextlib.py")
"""Files of `no_grad`, as a context and as a decorator."""


class Cut(NamedTuple):
    """Where the program cuts gradients off."""

    what: str
    """`detach`, `data` or `no_grad`."""
    line: UserLine

    def described(self, size: int) -> WrongOp:
        """The finding that without it the gradients are right."""
        return WrongOp(about=self.what, line=self.line, kind=MistakeKind.GRADIENT_CUT, in_backward=True, size=size)


class _Cuts(TorchFunctionMode):
    def __init__(self, seen: list[Cut], left_out: Cut | None) -> None:
        super().__init__()
        self._seen, self._left_out = seen, left_out

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_off = func is SET_GRAD_ENABLED and not args[0]
        what = "no_grad" if is_off else _DETACHED.get(func, "")
        cut = _cut(what) if what else None
        if cut is not None:
            self._seen.append(cut)
            if cut == self._left_out:
                return func(True) if is_off else args[0]
        return func(*args, **(kwargs or {}))


def _cut(what: str) -> Cut | None:
    """The user's line that does so; None where a library or what follows the run does, and where gradients are off."""
    if not torch.is_grad_enabled():
        return None
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
    caller = next(frame for frame in frames if not frame.f_code.co_filename.endswith(_OF_TORCH))
    file = caller.f_code.co_filename
    return None if is_library_file(file) or follows_run(file) else Cut(what, line_of_frame(caller))


@contextmanager
def cuts_of(seen: list[Cut]) -> Iterator[None]:
    """Add where the program cuts gradients off, in the order of execution."""
    with _Cuts(seen, None):
        yield


@contextmanager
def attached(cut: Cut) -> Iterator[None]:
    """Run the program without that."""
    with _Cuts([], cut):
        yield
