"""Other rows of the full parameters than those that a rank has, and the run with them.

A parameter does not show whether its rows are those that the rank should have: heads that several ranks hold, packed
weights and rows in turn are all meant somewhere. Which are, the results of the run with others say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tpcompile.evidence.records import MistakeKind
from tpcompile.numerics.optimizer_step import plain_name
from tpcompile.numerics.rows import Rows
from tpcompile.torch_api.dispatch import local_part

_PIECES = (1, 2, 3)
"""Matrices that may be packed in one: gate and up, queries with keys and values."""
_MOST = 16
"""Changes that are tried at most."""


class Recut(NamedTuple):
    """Parameters that are cut alike, and how else they may be cut."""

    names: tuple[str, ...]
    pieces: int
    """Matrices that are packed in each, every one of which is cut by itself."""
    index: Tensor
    """Rows of the full parameter that the rank would have."""
    changes: tuple[str, ...]
    """Those of the parameters of which this rank has other rows."""
    is_unusual: bool
    """True where this rank has other rows than its part in the order of the ranks."""

    @property
    def key(self) -> str:
        """The same on all ranks."""
        return f"{self.pieces}: {', '.join(self.names)}"

    @property
    def says(self) -> dict[str, Any]:
        """Fields of a WrongOp."""
        if self.pieces > 1:
            return {"kind": MistakeKind.CUT_AS_ONE, "pieces": f"{self.pieces} pieces"}
        return {"kind": MistakeKind.OTHER_PART}


def recuts_of(layouts: Mapping[str, Rows], *, rank: int, size: int) -> list[Recut]:
    """What may be tried with these parameters of a rank: with all that are cut alike, then with those of one module."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, rows in layouts.items():
        if rows.index is not None:
            alike = (rows.dim, rows.length, len(rows.index))
            groups.setdefault(alike, []).append(name)
            # The module of the parameter, the same in every layer.
            *module, leaf = (part for part in name.split(".") if not part.isdigit())
            groups.setdefault((*alike, ".".join(module) or leaf), []).append(name)
    found: dict[str, Recut] = {}
    for (_, length, part, *_), names in groups.items():
        usual = _rows(length, part, 1, rank=rank, size=size)
        for pieces in _PIECES:
            index = _rows(length, part, pieces, rank=rank, size=size)
            if index is None or usual is None:
                continue
            changes = tuple(name for name in names if not layouts[name].has(index))
            is_unusual = not all(layouts[name].has(usual) for name in names)
            recut = Recut(tuple(names), pieces, index, changes, is_unusual)
            found.setdefault(recut.key, recut)
    return list(found.values())[:_MOST]


def _rows(length: int, part: int, pieces: int, *, rank: int, size: int) -> Tensor | None:
    """The rows that a rank has in the order of the ranks, of each piece; None where they are no equal parts.

    Of fewer parts than ranks several ranks that follow one another have the same.
    """
    if not part or length % part or length % pieces or part % pieces:
        return None
    parts = length // part
    if size % parts or (pieces > 1 and parts != size):
        return None
    own, in_piece, of_piece = rank * parts // size, part // pieces, length // pieces
    starts = (piece * of_piece + own * in_piece for piece in range(pieces))
    return torch.cat([torch.arange(start, start + in_piece) for start in starts])


@contextmanager
def recut_as(
    module: nn.Module | None, reference: nn.Module | None, recut: Recut, layouts: Mapping[str, Rows]
) -> Iterator[None]:
    """Run the module with these rows of the reference's parameters; its own are back afterwards."""
    own, full = _parameters(module), _parameters(reference)
    before = {name: own[name].detach().clone() for name in recut.names}
    with torch.no_grad():
        for name in recut.names:
            rows = Rows(layouts[name].dim, recut.index, layouts[name].length)
            own[name].copy_(rows.of(full[name]))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, values in before.items():
                own[name].copy_(values)


def _parameters(module: nn.Module | None) -> dict[str, Tensor]:
    named = () if module is None else module.named_parameters()
    return {plain_name(name): local_part(each) for name, each in named}


def first_use(names: Sequence[str], given: Mapping[str, int]) -> int | None:
    """The place of the first of these parameters among those that a run was given; None for none."""
    return min((given[name] for name in names if name in given), default=None)
