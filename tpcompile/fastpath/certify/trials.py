"""Name of a fast path -> the cases that prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.fastpath.certificate import Kind
from tpcompile.layout import ShardSpec

Call = Callable[[Mapping[str, Any], Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
"""Arguments of one rank and its all-reduce -> outputs."""
OnRanks = Callable[[Call, list[dict[str, Any]]], list[tuple[Tensor, ...]]]
"""Runs a call on the arguments of every rank -> the outputs of every rank."""


class PartialSum(ShardSpec):
    """Of an argument that is the sum of what the ranks hold: each holds a multiple, different for every element."""

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
    """As the launcher and the plain code take them by name; floating tensors in float64."""
    rank_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What ranks are given in place of those: numbers that depend on the layout."""
    shards: Mapping[str, ShardSpec] = field(default_factory=dict)
    """Of arguments that ranks hold slices of; others are equal on all ranks."""
    outputs: tuple[ShardSpec, ...]
    """How the outputs of the ranks are joined; `ShardSpec()` for one that is equal on all ranks."""
    wide: frozenset[str] = frozenset()
    """Tensors that stay in float32 whatever the dtype: rotary tables, modulation."""
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
    """What is wrong with them."""
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All that certifies one fast path."""

    cases: Callable[[int], Iterable[Case]]
    """Number of ranks -> cases."""
    on_ranks: OnRanks
    """How the ranks are run on one device."""
    refusals: Callable[[torch.device], Iterable[Refusal]] = lambda device: ()
    """Device -> arguments that must be refused there."""
    equivalent: Mapping[str, str] = field(default_factory=dict)
    """Pattern of mutations that compute the same, as the certificate words them -> why."""
    unreached: Mapping[str, str] = field(default_factory=dict)
    """Pattern of mutations that are wrong where no case comes -> why none does."""

    def reason(self, change: str) -> tuple[Kind, str]:
        """Why no case catches a mutation, as declared."""
        for kind, declared in ((Kind.EQUIVALENT, self.equivalent), (Kind.UNREACHED, self.unreached)):
            for pattern, why in declared.items():
                if fnmatchcase(change, pattern):
                    return kind, why
        return Kind.MISSED, ""


_TRIALS: dict[str, Trial] = {}


def trial(
    name: str,
    *,
    on_ranks: OnRanks | None = None,
    refusals: Callable[[torch.device], Iterable[Refusal]] = lambda device: (),
    equivalent: Mapping[str, str] | None = None,
    unreached: Mapping[str, str] | None = None,
) -> Callable[[Callable[[int], Iterable[Case]]], Callable[[int], Iterable[Case]]]:
    """Declare the cases of the fast path `name`: a function from the number of ranks to cases.

    Unless `on_ranks` says otherwise, the ranks are run one after the other and their partial sums are added. The
    others are those of `Trial`.
    """
    from tpcompile.fastpath.certify.measure import one_by_one

    def declare(cases: Callable[[int], Iterable[Case]]) -> Callable[[int], Iterable[Case]]:
        _TRIALS[name] = Trial(
            cases=cases,
            on_ranks=on_ranks or one_by_one,
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
