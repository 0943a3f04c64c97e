"""Manifests of a program as it is and with one kind of op taken out -> which of them keeps kernels apart."""

from __future__ import annotations

from enum import StrEnum

from tpcompile.evidence.records import UserLine
from tpcompile.evidence.records.base import Frozen
from tpcompile.fusion.manifest import total, total_of
from tpcompile.fusion.manifest_records import Manifest, Totals


class Kind(StrEnum):
    """What is taken out of the graphs; the values are the names on the command line."""

    COPIES = "copies into inputs"
    EFFECTS = "side effects"
    TRANSPOSES = "transposes"
    LAYOUTS = "layouts"
    VIEWS = "view chains"
    CASTS = "casts"
    COLLECTIVES = "collectives"
    CUSTOM = "custom ops"
    SHAPES = "dynamic shapes"


WORDS = {
    Kind.COPIES: "what is written into inputs is returned instead",
    Kind.EFFECTS: "no asserts, no prints, no ops that are run for what they do",
    Kind.TRANSPOSES: "transposes are views, and no copy is made for a layout",
    Kind.LAYOUTS: "what is transposed is copied at once",
    Kind.VIEWS: "a view of a view is one view",
    Kind.CASTS: "everything stays in its dtype",
    Kind.COLLECTIVES: "each rank goes on with what it has",
    Kind.CUSTOM: "custom ops and Triton kernels of yours are sums of their inputs",
    Kind.SHAPES: "every size is a constant",
}
_OWN_LAUNCHES = {Kind.EFFECTS: 1, Kind.COLLECTIVES: 1, Kind.CUSTOM: 1}
"""How many launches one op of that kind is; they are no gain of fusion."""
_FEWER_BYTES = 0.99


class TakenOut(Frozen):
    """An op that a rewrite took out of a graph."""

    op: str
    lines: tuple[UserLine, ...]


class Attempt(Frozen):
    """The program with one kind of op taken out."""

    kind: Kind
    taken_out: tuple[TakenOut, ...] = ()
    now: Totals | None = None
    """None where there was nothing to take out, or the rewritten graph could not be compiled."""
    failed: str = ""


class Bisection(Frozen):
    """What taking each kind of op out does to the kernels. Test-only: what a rewritten program computes is wrong."""

    as_it_is: Totals
    attempts: tuple[Attempt, ...]

    def fewer_kernels(self, attempt: Attempt) -> int:
        """Launches that are gone besides those of the ops themselves; negative where there are more."""
        if attempt.now is None:
            return 0
        own = _OWN_LAUNCHES.get(attempt.kind, 0) * len(attempt.taken_out)
        return self.as_it_is.kernels - attempt.now.kernels - own

    def helps(self, attempt: Attempt) -> bool:
        """True where kernels are gone, or as many move fewer bytes."""
        fewer = self.fewer_kernels(attempt)
        if fewer or attempt.now is None:
            return fewer > 0
        # The bytes of ops that are launches themselves are gone in any case.
        are_launches = attempt.kind in _OWN_LAUNCHES
        return not are_launches and attempt.now.bytes < _FEWER_BYTES * self.as_it_is.bytes


def totals(manifest: Manifest) -> Totals:
    """Kernels and bytes of all graphs."""
    return total_of(total(graph.launches) for graph in manifest.graphs)
