"""Name of a fast path -> the cases that prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import first
from tpcompile.nn.sharding import ShardSpec

Call = Callable[[Mapping[str, Any], Callable[[Tensor], Tensor]], tuple[Tensor, ...]]
"""Arguments of one rank and its all-reduce -> outputs."""
OnRanks = Callable[[Call, list[dict[str, Any]]], list[tuple[Tensor, ...]]]
"""Runs a call on the arguments of every rank -> the outputs of every rank."""


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
    """True when the gradients are not looked at."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """All that certifies one fast path."""

    cases: Callable[[int], Iterable[Case]]
    """Number of ranks -> cases."""
    on_ranks: OnRanks
    """How the ranks are run on one device."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """Pattern of mutations that nothing can catch, as the certificate words them -> why."""

    def reason(self, change: str) -> str:
        """Why nothing can catch a mutation; empty when nothing is declared."""
        return first(why for pattern, why in self.unreachable.items() if fnmatchcase(change, pattern)) or ""


_TRIALS: dict[str, Trial] = {}


def trial(
    name: str, *, on_ranks: OnRanks | None = None, unreachable: Mapping[str, str] | None = None
) -> Callable[[Callable[[int], Iterable[Case]]], Callable[[int], Iterable[Case]]]:
    """Declare the cases of the fast path `name`: a function from the number of ranks to cases.

    Unless `on_ranks` says otherwise, the ranks are run one after the other and their sums are reduced by hand.
    """
    from tpcompile.fastpath.certify.measure import one_by_one

    def declare(cases: Callable[[int], Iterable[Case]]) -> Callable[[int], Iterable[Case]]:
        _TRIALS[name] = Trial(cases=cases, on_ranks=on_ranks or one_by_one, unreachable=dict(unreachable or {}))
        return cases

    return declare


def trial_of(name: str) -> Trial:
    """The declared trial; ConfigError when there is none."""
    if name not in _TRIALS:
        known = ", ".join(sorted(_TRIALS)) or "none"
        raise ConfigError(f"fast path {name} has no cases: declare them with @trial({name!r}) (declared: {known})")
    return _TRIALS[name]
