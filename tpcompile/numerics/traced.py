"""A call -> every op of one eager run: its line, what it was given, a fingerprint of its result.

A fingerprint is short, so a run of any size can be kept; and linear, so the sum of those of all ranks is that of the
sum over the ranks. An op of a backward pass has the line of the op whose gradient it makes. Seen on torch 2.11.0 and
2.13.0: the weak dictionary of `torch.utils.weak`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text.lines import line_of_frame
from tpcompile.numerics.callers import caller, callers, follows_run, is_by_hand
from tpcompile.numerics.fingerprints import Part, Summary, fingerprint, summary
from tpcompile.numerics.op_names import IN_SOME_RUNS, WRITTEN_UNSAID
from tpcompile.numerics.optimizer_step import plain_name
from tpcompile.numerics.rows import Cut
from tpcompile.numerics.trace import Axis, Change, Trace, Value
from tpcompile.torch_api.dispatch import (
    AsyncCollectiveTensor,
    TorchDispatchMode,
    backward_number,
    forward_number,
    local_part,
    tree_flatten,
)

_WAIT = "_c10d_functional.wait_tensor"
_READ = "aten._local_scalar_dense"
"""What `item()` is."""
_FUNCTIONAL, _IN_PLACE = "_c10d_functional.", "c10d."
"""Ops whose result is not there yet when they return."""
_STILL_PENDING = ("_c10d_functional._wrap_tensor_autograd", "aten.view")
"""Ops that an AsyncCollectiveTensor takes without a wait; any other one waits for it."""
_DIMS_OF_AXES = 2
"""Dims that other axes of a mesh cut: samples and tokens."""
_ALIASES = ("aten.detach", "aten.alias", "aten.view", "aten._unsafe_view", "aten.clone")
"""Ops that return the numbers of a tensor of the same shape, in its order."""
_ON_LISTS = ("aten._foreach_", "aten._fused_adam", "aten._fused_sgd", "aten._fused_adagrad")
"""Ops of optimizers: the first result is made of the first tensors of all lists."""


def traced(module: nn.Module, inputs: tuple[Any, ...], *, rank: int = 0, size: int = 1) -> Trace:
    """Run the module in eager, without gradients; `parts` are those of the ranks of `size`."""

    def call() -> Mapping[str, Tensor]:
        with torch.no_grad():
            module(*inputs)
        return {}

    return traced_call(call, module, size=size)


LineOf = Callable[[str, FrameType], UserLine]
"""Op and the frame that runs it -> its line."""


def _innermost(_name: str, frame: FrameType) -> UserLine:
    return line_of_frame(frame)


def traced_call(
    call: Callable[[], Mapping[str, Tensor]],
    module: nn.Module | None,
    *,
    size: int = 1,
    cuts: Sequence[Cut] = (),
    axes: Sequence[Axis] = (),
    line_of: LineOf = _innermost,
    change: Change | None = None,
) -> Trace:
    """Run the call in eager, forward and backward; `module` names its parameters.

    `parts` are those of `size` ranks, of the rank that has these cuts, and along other `axes`; `line_of` gives the
    line of an op, by default the innermost of the user's. `change` is what a run would have been with a different
    result of an op.
    """
    named: list[tuple[str, Tensor]] = []
    if module is not None:
        named = [*module.named_parameters(), *module.named_buffers()]
    names = {id(local_part(tensor)): plain_name(name) for name, tensor in named}
    mode = _Tracing(names, size=size, cuts=cuts, axes=axes, line_of=line_of, change=change)
    with mode.following(module), mode:
        results = call()
    for name, tensor in results.items():
        local = local_part(tensor)
        place = mode.place_of(local.elem if isinstance(local, AsyncCollectiveTensor) else local)
        if place is not None:
            mode.trace.results[name] = place
    return mode.trace


@dataclass(frozen=True)
class _Op:
    """What all results of one op share."""

    name: str
    line: UserLine | None
    sources: tuple[int, ...] = ()
    is_given: bool = False
    forward: int | None = None
    in_backward: bool = False
    is_by_hand: bool = False
    is_late: bool = False
    callers: tuple[UserLine, ...] = ()
    numbers: tuple[float, ...] = ()


class _Tracing(TorchDispatchMode):
    def __init__(
        self,
        names: dict[int, str],
        *,
        size: int,
        cuts: Sequence[Cut],
        axes: Sequence[Axis],
        line_of: LineOf,
        change: Change | None,
    ) -> None:
        super().__init__()
        self._line_of, self._change = line_of, change
        self._num_kept = 0
        self.trace = Trace()
        self._names, self._size, self._cuts, self._axes = names, size, cuts, axes
        self._places: Any = WeakTensorKeyDictionary()
        self._modules: list[str] = []
        self._numbers: dict[float, int] = {}
        """Number that the program read from a tensor, in float32 -> place of the tensor."""
        self._forward_of: dict[int, int] = {}
        """Number of an autograd node -> place of the op that it was made for."""

    @contextmanager
    def following(self, module: nn.Module | None) -> Iterator[None]:
        """Keep what modules return, and which of them run."""
        handles = []
        for name, each in module.named_modules() if module is not None else ():
            plain = plain_name(name)
            handles.append(each.register_forward_pre_hook(self._entering(plain)))
            handles.append(each.register_forward_hook(self._leaving(plain), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        return lambda _module, _args: self._modules.append(name)

    def _leaving(self, name: str) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            self._modules.pop()
            self.trace.outputs[name] = [self._places[tensor] for tensor in _tensors(output) if tensor in self._places]

        return hook

    def place_of(self, tensor: Any) -> int | None:
        """The place of a tensor that some op made or was given."""
        return self._places.get(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the ops on its local tensors are seen then
        kwargs = kwargs or {}
        given = list(_tensors((args, kwargs)))
        name = func._schema.name.replace("::", ".")
        op = self._op(name, self._line_of_caller(name))
        if op.is_by_hand or not op.in_backward:
            op = replace(op, callers=callers(), numbers=_numbers(args))
        sources = tuple(self._place_in(tensor, op) for tensor in given)
        if func._schema.is_mutable:  # it may write into what a collective has written
            self._know_waited(given, name=_IN_PLACE)
        out = func(*args, **kwargs)
        pending = [value for value in map(self.trace.values.__getitem__, sources) if value.tensor is None]
        is_collective = name.startswith((_FUNCTIONAL, _IN_PLACE)) and name != _WAIT
        is_late = bool(pending) if name in _STILL_PENDING else is_collective
        if name not in _STILL_PENDING:
            self._know_waited(given)
        has_number = name not in IN_SOME_RUNS and not func._schema.is_mutable
        if self._change is not None and has_number and not op.in_backward:
            out = self._changed(out, self._change)
        results = list(_tensors(out))
        if func._schema.is_mutable or name.startswith(_IN_PLACE):
            results += given
        if name in WRITTEN_UNSAID:
            first = WRITTEN_UNSAID[name]
            results += _tensors(args[first : first + 2])
        if name == _READ and isinstance(out, float):
            self._numbers[_rounded(out)] = sources[0]
        if name == _WAIT and pending:  # the collective was seen: the result is its
            begun = pending[0]
            op = _Op(
                begun.name, begun.line, forward=begun.forward, in_backward=begun.in_backward, callers=begun.callers
            )
        if results and not op.in_backward:
            self._forward_of.setdefault(forward_number(), len(self.trace.values))
        apart = _read_for_each(name, args, results)
        for number, tensor in enumerate(results):
            own = tuple(self._places[each] for each in apart[number]) if apart else sources
            self._keep(tensor, replace(op, sources=own, is_late=is_late))
        return out

    def _know_waited(self, given: Sequence[Tensor], *, name: str = "") -> None:
        """Keep the numbers of collectives for which an op has waited: what it was given was not there before.

        `name` is how their names begin.
        """
        for tensor in given:
            left = [self._places[tensor]]
            while left:
                place = left.pop()
                value = self.trace.values[place]
                is_pending = value.is_late and value.tensor is None and value.name.startswith(name)
                if is_pending and value.shape == tuple(tensor.shape):
                    known = self._summary(tensor, _Op(value.name, value.line))
                    self.trace.values[place] = replace(
                        value, tensor=known.whole, parts=known.parts, moments=known.moments
                    )
                    left += value.sources

    def _changed(self, out: Any, change: Change) -> Any:
        """What the op returns instead; the place of its result is the next one."""
        first, *others = out if isinstance(out, tuple) and out else (out,)
        if not isinstance(first, Tensor):
            return out
        changed = change(self._num_kept, first)
        return (changed, *others) if isinstance(out, tuple) else changed

    def _op(self, name: str, line: UserLine | None) -> _Op:
        """The op with the line of its forward op in a backward pass; the node of a copy has no op, but its user has.

        Of a backward pass that is written by hand it has its own line.
        """
        number = backward_number()
        is_recomputed = torch.is_grad_enabled()  # by activation checkpointing; else backward passes run without
        if number is None or is_recomputed:
            return _Op(name, line)
        by_hand = is_by_hand(caller())
        later = [known for known in self._forward_of if known >= number]
        if not later:
            return _Op(name, line, in_backward=True, is_by_hand=by_hand)
        place = self._forward_of[min(later)]
        forward = self.trace.values[place]
        own = line if by_hand else forward.line
        return _Op(name, own, callers=forward.callers, forward=place, in_backward=True, is_by_hand=by_hand)

    def _line_of_caller(self, name: str) -> UserLine | None:
        """The line that runs the op; None where that is the code which follows the run."""
        line = self._line_of(name, caller())
        return None if follows_run(line.file) else line

    def _place_in(self, tensor: Tensor, op: _Op) -> int:
        known = self._places.get(tensor)
        if known is not None and self.trace.values[known].line is None:
            self.trace.values[known] = replace(self.trace.values[known], line=op.line, callers=op.callers)
        if known is None:
            given = _Op(self._names.get(id(tensor), "an input"), op.line, is_given=True, callers=op.callers)
            read = self._numbers.get(_rounded(float(tensor.detach()))) if tensor.numel() == 1 else None
            self._keep(tensor, given if read is None else _Op("a number", op.line, (read,)))
        return int(self._places[tensor])

    def _keep(self, tensor: Tensor, op: _Op) -> None:
        module = self._modules[-1] if self._modules else ""
        if op.forward is not None:
            module = self.trace.values[op.forward].module
        known = None if op.is_late else self._summary(tensor, op)
        unit = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        value = Value(
            op.name,
            tuple(tensor.shape),
            None if known is None else known.whole,
            () if known is None else known.parts,
            op.line,
            op.sources,
            moments=() if known is None else known.moments,
            unit=max(unit, *(self.trace.values[place].unit for place in op.sources), 0.0),
            is_float=tensor.is_floating_point(),
            is_given=op.is_given,
            module=module,
            forward=op.forward,
            in_backward=op.in_backward,
            is_by_hand=op.is_by_hand,
            is_late=op.is_late,
            callers=op.callers,
            node=None if op.in_backward else forward_number(),
            numbers=op.numbers,
        )
        self._places[tensor] = len(self.trace.values)
        self.trace.values.append(value)
        self._num_kept += op.name not in IN_SOME_RUNS

    def _summary(self, tensor: Tensor, op: _Op) -> Summary:
        """The summary of a tensor; an alias has that of what it is one of."""
        source = self.trace.values[op.sources[0]] if op.name in _ALIASES and op.sources else None
        if source is None or source.tensor is None or source.shape != tuple(tensor.shape):
            found = summary(tensor, size=self._size)
            cut = [(cut.rank, part) for cut in self._cuts for part in cut.parts_of(tensor.detach())]
            more = [Part(rank, tuple(part.shape), fingerprint(part)) for rank, part in cut]
            return replace(found, parts=(*found.parts, *more, *self._parts_along_axes(tensor.detach())))
        return Summary(source.tensor, source.parts, source.moments)

    def _parts_along_axes(self, tensor: Tensor) -> Iterator[Part]:
        """What this rank has of samples or tokens that are cut along another axis, and the parts of that."""
        for axis in self._axes:
            for dim in range(min(tensor.dim(), _DIMS_OF_AXES)):
                if tensor.shape[dim] % axis.size == 0 and tensor.shape[dim]:
                    own = tensor.chunk(axis.size, dim)[axis.at]
                    found = summary(own, size=self._size)
                    yield from (Part(rank, tuple(own.shape), found.whole) for rank in range(self._size))
                    yield from found.parts


def _read_for_each(name: str, args: Sequence[Any], results: Sequence[Tensor]) -> list[list[Tensor]]:
    """What each result of an op on lists of tensors was made from: one of each list. Empty for any other op."""
    if not name.startswith(_ON_LISTS) or not args or not results:
        return []
    length = len(args[0])
    lists = [each for each in args if isinstance(each, (list, tuple)) and len(each) == length]
    single = [each for each in args if isinstance(each, Tensor)]
    together = [list(_tensors([*each, *single])) for each in zip(*lists, strict=True)]
    if len(results) == length:
        return together
    by_tensor = {id(tensor): each for each in together for tensor in each}
    return [by_tensor.get(id(tensor), [tensor]) for tensor in results]


def _numbers(args: Sequence[Any]) -> tuple[float, ...]:
    return tuple(float(each) for each in args if isinstance(each, (int, float)))


def _rounded(number: float) -> float:
    return float(torch.tensor(number, dtype=torch.float32))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors with values; the result of a functional collective may still be in flight."""
    leaves, _ = tree_flatten(value)
    for leaf in leaves:
        tensor = leaf
        if isinstance(leaf, AsyncCollectiveTensor):
            tensor = leaf.elem
        is_plain = type(tensor) in (Tensor, nn.Parameter)  # no DTensor, which has a value on no rank
        if not is_plain or tensor.is_meta or tensor.is_complex():
            continue
        yield tensor
