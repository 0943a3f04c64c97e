"""Programs of several groups of ranks -> whether they are one program in different orders, which is a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tpcompile.evidence.groups.by_group import Items, Row, side_by_side
from tpcompile.evidence.iterables import differ, find, grouped
from tpcompile.evidence.layers.node_text import (
    REFERENCE,
    called,
    is_body,
    nodes_in,
    op_of,
    read_instead,
    scope_of,
    unnumbered,
)
from tpcompile.evidence.records import Item

_HIGHER_ORDER = "torch.ops.higher_order."


@dataclass(frozen=True)
class Permutation:
    """Groups of ranks that run the same program in different orders."""

    of: Literal["collectives", "ops", "reads"]
    """What is permuted: collectives on the same values, ops, or the values that the same ops read."""
    row: Row
    """The first place at which the orders differ."""
    shown: str
    """The text of what the groups have at that place."""

    @property
    def says(self) -> str:
        """The headline."""
        what = "collectives" if self.of == "collectives" else "ops"
        return f"the same {what} in a different order: {self.shown}"


def reordered_ops(items: Items) -> Permutation | None:
    """The same ops in a different order, or in the same order on the same values in a different order."""
    nodes = nodes_in(items)
    ops = nodes.map(lambda own: tuple(sorted(map(op_of, own))))
    if ops.differ() or not differ(ops[0]):
        return None
    row = find(side_by_side(nodes), lambda row: not row.agree_in(op_of))
    if row is not None:
        return Permutation("ops", row, " / ".join(dict.fromkeys(map(called, row.present))))
    reads = nodes.map(lambda own: tuple(sorted(" ".join(node.notes["reads"] for node in own).split())))
    if reads.differ():
        return None
    row = find(side_by_side(nodes), lambda row: row.differs_in_note("reads"))
    if row is None:
        return None
    return Permutation("reads", row, f"{called(row.first)} of {read_instead(items, row)}")


def reordered_collectives(items: Items) -> Permutation | None:
    """Different collectives at one place, each of which all groups issue, on the same values.

    Where their sizes are equal, the schedule of the collectives is equal too: they combine different values. A call of
    an autograd function counts as the collective in its forward. None where a group lacks one of them: that program is
    different, not reordered.
    """
    known: dict[str, int] = {}
    programs = [_ValueNumbers(nodes, known) for nodes in nodes_in(items)]
    at = find(zip(*(program.issued for program in programs), strict=False), differ)
    if at is None:
        return None
    is_in_all = all(set(at) <= set(program.issued) for program in programs)
    if not is_in_all:
        return None
    pairs = zip(programs, at, strict=True)
    row = Row(program.issuing[program.issued.index(value)] for program, value in pairs)
    return Permutation("collectives", row, read_instead(items, row))


class _ValueNumbers:
    """The nodes of one group of ranks, each with the number of the value that it computes, the same in all groups."""

    def __init__(self, nodes: Sequence[Item], known: dict[str, int]) -> None:
        """`known` holds the numbers that the groups before this one were given."""
        self.scopes = grouped(nodes, scope_of)
        program = self.scopes.get("", ())
        standing = [node.about for node in program if is_body(node)]
        inner = [nodes for scope, nodes in self.scopes.items() if scope.count("/") == 1]
        self.bodies: dict[str, Sequence[Item]] = {}
        """Node that stands for a subgraph -> the nodes of that; empty where they cannot be told apart."""
        if len(standing) == len(inner):
            self.bodies = dict(zip(standing, inner, strict=True))
        self.values: dict[str, int] = {}
        inner_first = sorted(nodes, key=lambda node: scope_of(node).count("/"), reverse=True)
        for node in inner_first:
            self.values[node.about] = known.setdefault(self._text(node), len(known))
        self.issuing = list(filter(self._issues, program))
        """Collectives, and calls of autograd functions with one in the forward, in order."""
        self.issued = [self.values[node.about] for node in self.issuing]

    def _text(self, node: Item) -> str:
        """Equal for nodes that compute the same: with numbers of values in place of those of nodes."""

        def value_of(reference: re.Match[str]) -> str:
            return f"#{self.values.get(scope_of(node) + reference[0])}"

        fields = node.fields
        call = REFERENCE.sub(value_of, f"{unnumbered(fields['target'])}({fields['args']})")
        inside = [self.values[one.about] for one in self.bodies.get(node.about, ())]
        return f"{fields['op']} {call} {fields['value']} {inside}"

    def _issues(self, node: Item) -> bool:
        """True for a collective, and for a higher-order op with one in the first subgraph that it is given."""
        if "collective" in node.notes:
            return True
        if not node.fields["target"].startswith(_HIGHER_ORDER):
            return False
        forward = find(node.notes["reads"].split(), lambda read: read in self.bodies)
        return any("collective" in one.notes for one in self.bodies.get(forward or "", ()))
