"""Name of a fast path -> the cases that prove it, and how they run on the shards of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.fastpath.certificate import Kind
from tpcompile.fastpath.certify.fences import spaced
from tpcompile.layout import ShardSpec

Call = Callable[[Mapping[str, Any], Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
"""Arguments of one rank and its all-reduce -> outputs."""
OnRanks = Callable[[Call, list[dict[str, Any]]], list[tuple[Tensor, ...]]]
"""Runs a call on the arguments of every rank -> the outputs of every rank."""


class PartialSum(ShardSpec):
    """The layout of an argument that is the sum over the ranks: each holds a multiple of it, by element."""

    def take(self, full: Tensor, *, rank: int, size: int) -> Tensor:
        """Times 2, -1, 1, -1, ... -1, which add up to 1 without rounding; the ranks take turns along the last dim."""
        multiples = full.new_tensor([1.0] if size == 1 else [2.0, -1.0, *[1.0, -1.0] * (size // 2 - 1)])
        turns = (torch.arange(full.shape[-1], device=full.device) + rank) % size
        return full * multiples[turns]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call on whole tensors, and how they are spread over the ranks."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments of the launcher and of the plain code by name; floating tensors in float64."""
    rank_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What each rank is given in place of arguments of that name: numbers that depend on the layout."""
    shards: Mapping[str, ShardSpec] = field(default_factory=dict)
    """Layouts of the arguments that ranks hold slices of; others are equal on all ranks."""
    outputs: tuple[ShardSpec, ...]
    """How the outputs of the ranks are joined; `ShardSpec()` for an output that is equal on all ranks."""
    wide: frozenset[str] = frozenset()
    """Tensors that stay in float32 in every dtype: rotary tables, modulation."""
    constant: frozenset[str] = frozenset()
    """Tensors that get no gradient: rotary tables."""
    memory: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """How tensors lie in memory when not dense: `fences.spaced`, or `far_apart` with `forward_only`."""
    forward_only: bool = False
    """True when the gradients are not compared."""

    @property
    def sharded(self) -> frozenset[str]:
        """Arguments that ranks hold different slices of."""
        return frozenset(name for name, spec in self.shards.items() if spec.dim is not None)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Arguments of one rank that the launcher must refuse, with FastPathError before anything is launched."""

    name: str
    """What is wrong with the arguments."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All that certifies one fast path."""

    cases: Callable[[int], Iterable[Case]]
    """Number of ranks -> cases."""
    on_ranks: OnRanks
    """How the ranks are run on one device."""
    refusals: Callable[[torch.device], Iterable[Refusal]] = lambda device: ()
    """Device -> arguments that the launcher must refuse there."""
    equivalent: Mapping[str, str] = field(default_factory=dict)
    """Pattern of mutations that compute the same, in the words of the certificate -> why."""
    unreached: Mapping[str, str] = field(default_factory=dict)
    """Pattern of mutations that are wrong only where no case can go -> why none can."""

    def reason(self, change: str) -> tuple[Kind, str]:
        """Why no case catches a mutation, as declared."""
        for kind, declared in ((Kind.EQUIVALENT, self.equivalent), (Kind.UNREACHED, self.unreached)):
            for pattern, why in declared.items():
                if fnmatchcase(change, pattern):
                    return kind, why
        return Kind.MISSED, ""


def one_by_one(call: Call, ranks: list[dict[str, Any]]) -> list[tuple[Tensor, ...]]:
    """Run every rank up to its next all-reduce, sum, and run all again with that sum; until all are through.

    Raises DivergenceError when some ranks reduce more often than others.
    """
    sums: list[Tensor] = []
    while True:
        outputs = []
        partials = []
        for arguments in ranks:
            try:
                outputs.append(call(arguments, _Replayed(sums)))
            except _NeedsSumError as needs:
                partials.append(needs.partial)
        if not partials:
            return outputs
        if outputs:
            done = f"{len(outputs)} of {len(ranks)} ranks"
            raise DivergenceError(f"{done} all-reduce {len(sums)} times, and the remaining ranks one more time")
        sums.append(spaced(torch.stack(partials).sum(0)))


class _NeedsSumError(Exception):
    """A rank has come to an all-reduce whose sum is not known yet."""

    def __init__(self, partial: Tensor) -> None:
        super().__init__()
        self.partial = partial


class _Replayed:
    """The all-reduce of a rank: gives the known sums in order."""

    def __init__(self, sums: list[Tensor]) -> None:
        self._left = iter(sums)

    def __call__(self, partial: Tensor) -> Tensor:
        known = next(self._left, None)
        if known is None:
            raise _NeedsSumError(partial)
        return known


_TRIALS: dict[str, Trial] = {}


def trial(
    name: str,
    *,
    on_ranks: OnRanks = one_by_one,
    refusals: Callable[[torch.device], Iterable[Refusal]] = lambda device: (),
    equivalent: Mapping[str, str] | None = None,
    unreached: Mapping[str, str] | None = None,
) -> Callable[[Callable[[int], Iterable[Case]]], Callable[[int], Iterable[Case]]]:
    """Declare the cases of the fast path `name`: a function from the number of ranks to cases.

    By default the ranks are run one after the other and their partial sums are added. The other arguments are fields of
    `Trial`.
    """

    def declare(cases: Callable[[int], Iterable[Case]]) -> Callable[[int], Iterable[Case]]:
        _TRIALS[name] = Trial(
            cases=cases,
            on_ranks=on_ranks,
            refusals=refusals,
            equivalent=dict(equivalent or {}),
            unreached=dict(unreached or {}),
        )
        return cases

    return declare


def trial_of(name: str) -> Trial:
    """The declared trial; ConfigError when there is none."""
    if name not in _TRIALS:
        known = ", ".join(sorted(_TRIALS)) or "none"
        raise ConfigError(f"fast path {name} has no cases: declare them with @trial({name!r}) (declared: {known})")
    return _TRIALS[name]
