"""Nodes of the programs of several groups of ranks -> a number for what each computes, the same in all groups."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tpcompile.evidence.iterables import find, grouped
from tpcompile.evidence.layers.node_text import REFERENCE, is_body, scope_of, unnumbered
from tpcompile.evidence.records import Item

_HIGHER_ORDER = "torch.ops.higher_order."


class ValueNumbers:
    """The nodes of one group of ranks, each with the number of the value that it computes."""

    def __init__(self, nodes: Sequence[Item], known: dict[str, int]) -> None:
        """`known` holds the numbers that the groups before this one were given."""
        self.scopes = grouped(nodes, scope_of)
        self.bodies = self._bodies()
        self.values: dict[str, int] = {}
        inner_first = sorted(nodes, key=lambda node: scope_of(node).count("/"), reverse=True)
        for node in inner_first:
            self.values[node.about] = known.setdefault(self._text(node), len(known))
        self.issuing = list(filter(self._issues, self.scopes.get("", ())))
        """Collectives, and calls of autograd functions with one in the forward, in order."""
        self.issued = [self.values[node.about] for node in self.issuing]

    def _bodies(self) -> dict[str, Sequence[Item]]:
        """Node that stands for a subgraph -> the nodes of that; empty where they cannot be told apart."""
        program = self.scopes.get("", ())
        standing = [node.about for node in program if is_body(node)]
        inner = [nodes for scope, nodes in self.scopes.items() if scope.count("/") == 1]
        if len(standing) != len(inner):
            return {}
        return dict(zip(standing, inner, strict=True))

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
