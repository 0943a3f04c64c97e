"""The random numbers of a run on one device -> the same ones in its repetition in float64; and its coarsest dtype.

A GPU draws other numbers for a different dtype, and so does `randn` on the CPU: the mask of a dropout in float64 would
not be the one in bfloat16, and against such a reference every program is as right as any other. Nor is a program in
float64 that goes on in float32 where it says `.float()`: a loss that is given both dtypes raises.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tpcompile.torch_api.dispatch import TorchDispatchMode

_DROPOUT = "native_dropout"
_DRAWS = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "random_", "randperm", "uniform_", _DROPOUT,
}  # fmt: skip
"""Ops whose results are drawn; an attention that drops inside its kernel shows no mask, so it is not among them."""
_NARROWER = (torch.float32, torch.bfloat16, torch.float16)
_Key = tuple[str, tuple[int, ...]]
"""Name of an op, and the shape of what it draws."""


class Drawn:
    """What one run drew."""

    def __init__(self) -> None:
        self.is_known = False
        self.numbers: defaultdict[_Key, list[Tensor]] = defaultdict(list)
        self.coarsest = torch.float64
        """The floating dtype with the largest unit in the last place in which an op has computed."""

    def recorded(self) -> AbstractContextManager[Any]:
        """A context that keeps what is drawn in the first run; a later one draws the same by its seed."""
        if self.is_known:
            return nullcontext()
        self.is_known = True
        return _Draws(self._keep, self._see)

    def again(self) -> AbstractContextManager[Any]:
        """A context in which the same is drawn, op by op; what the run did not draw is drawn anew."""
        if not self.numbers:
            return nullcontext()
        left = {key: deque(numbers) for key, numbers in self.numbers.items()}

        def take(key: _Key, drawn: Tensor) -> Tensor:
            numbers = left.get(key)
            return drawn.copy_(numbers.popleft()) if numbers else drawn

        return _Draws(take)

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """A context in which the same is drawn, and all that is computed in a narrower dtype is in float64."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with _Float64(), self.again():
                yield
        finally:
            torch.set_default_dtype(before)

    def _see(self, result: Any) -> None:
        is_float = isinstance(result, Tensor) and result.is_floating_point()
        if is_float and torch.finfo(result.dtype).eps > torch.finfo(self.coarsest).eps:
            self.coarsest = result.dtype

    def _keep(self, key: _Key, drawn: Tensor) -> Tensor:
        self.numbers[key].append(drawn.detach().clone())
        return drawn


class _Draws(TorchDispatchMode):
    """Gives what every op draws to a function, and goes on with what that returns; shows what every op returns."""

    def __init__(
        self, on_drawn: Callable[[_Key, Tensor], Tensor], on_result: Callable[[Any], None] = lambda result: None
    ) -> None:
        super().__init__()
        self._on_drawn = on_drawn
        self._on_result = on_result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op."""
        result = func(*args, **(kwargs or {}))
        self._on_result(result)
        name = func.overloadpacket.__name__
        if name not in _DRAWS:
            return result
        if name != _DROPOUT:
            return self._on_drawn((name, tuple(result.shape)), result)
        x, p, is_training = args
        if not is_training or not 0 < p < 1:
            return result
        mask = self._on_drawn((name, tuple(x.shape)), result[1])
        return torch.where(mask, x / (1 - p), 0), mask


class _Float64(TorchDispatchMode):
    """Gives float64 to each op that is told to make a narrower dtype: casts, and functions that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op."""
        given = dict(kwargs or {})
        if given.get("dtype") in _NARROWER:
            given["dtype"] = torch.float64
        return func(*args, **given)
