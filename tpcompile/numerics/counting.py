"""One run of a module -> the collectives it issued, in order, and the first difference from the declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import TpComm
from tpcompile.evidence.records import Collective
from tpcompile.nn.sharding import DTYPE_NAMES, Declared
from tpcompile.recording import CaptureSession
from tpcompile.torch_api import compiler as compat
from tpcompile.torch_api.simulated import CollectiveListener

Declaration = Declared | Sequence[Collective] | Callable[[nn.Module, torch.dtype], Declared | Sequence[Collective]]


class EagerCollectives:
    """Records the collectives of eager code, forward and backward, whichever API issues them."""

    def __init__(self, comm: TpComm) -> None:
        self._roles = roles_of(comm)
        self._phase = "forward"
        self.collectives: list[Collective] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record the collectives of this process, its autograd threads included."""
        with CollectiveListener(self._append):
            yield

    def on_backward(self) -> None:
        """Mark the start of the backward pass."""
        self._phase = "backward"

    def _append(self, op: str, reduce_op: str, sent: Tensor, group_name: str) -> None:
        self.collectives.append(
            Collective(
                phase=self._phase,
                op=op,
                reduce_op=reduce_op,
                dtype=DTYPE_NAMES.get(sent.dtype, str(sent.dtype).removeprefix("torch.")),
                shape=str(list(sent.shape)),
                group=self._roles.get(group_name, group_name),
            )
        )


def compiled_collectives(session: CaptureSession) -> list[Collective]:
    """Collectives of all lowered graphs of a session, forward before backward."""
    found = [collective for record in session.compiles() for collective in record.collectives]
    return sorted(found, key=lambda c: c.phase == "backward")


def roles_of(comm: TpComm) -> dict[str, str]:
    """Group name -> `tp` for the group of `comm`, else its description."""
    own = {} if comm.group is None else {comm.group.group_name: "tp"}
    return compat.group_roles() | own


def declared_by(
    declaration: Declaration, module: nn.Module, dtype: torch.dtype, *, size: int, train: bool
) -> list[Collective]:
    """Collectives that a declaration lists for this run; none in a group of one rank."""
    if size == 1:
        return []
    found: Any = declaration
    if callable(found):
        found = found(module, dtype)
    if isinstance(found, Declared):
        found = found.select(train=train)
    phases = ("forward", "backward") if train else ("forward",)
    return [collective for collective in found if collective.phase in phases]


def first_difference(seen: Sequence[Collective], declared: Sequence[Collective]) -> str:
    """The first position at which they differ, and both sides; empty when they are equal and every result is used."""
    issued_texts = [collective_text(collective) for collective in seen]
    declared_texts = [collective_text(collective) for collective in declared]
    pairs = zip_longest(issued_texts, declared_texts, fillvalue="nothing")
    for place, (got, want) in enumerate(pairs):
        if got != want:
            return f"position {place}: issued {got}, declared {want} ({len(seen)} issued, {len(declared)} declared)"
    return ""


def collective_text(collective: Collective) -> str:
    """One collective as it is written in reports."""
    op = f"{collective.op}({collective.reduce_op})" if collective.reduce_op else collective.op
    waited = "" if collective.waited else ", never waited for"
    used = "" if collective.used else ", its result dropped"
    return f"{collective.phase} {op} {collective.dtype}{collective.shape} over {collective.group}{waited}{used}"
