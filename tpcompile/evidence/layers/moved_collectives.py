"""Programs of groups of ranks -> the first collectives that they issue on the same values in different orders."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.iterables import differ, find, grouped
from tpcompile.evidence.layers.node_text import REFERENCE, is_body, scope_of, unnumbered
from tpcompile.evidence.records import Item

_HIGHER_ORDER = "torch.ops.higher_order."


def moved_collectives(items: Items) -> Row | None:
    """The first place at which groups issue different collectives, each of which all of them issue.

    A call of an autograd function counts as the collective in its forward. None where a group lacks one of them: that
    program is different, not reordered.
    """
    known: dict[str, int] = {}
    programs = items.map(lambda nodes: _Program(nodes, known))
    at = find(zip(*(program.issued for program in programs), strict=False), differ)
    if at is None:
        return None
    is_in_all = all(set(at) <= set(program.issued) for program in programs)
    if not is_in_all:
        return None
    pairs = zip(programs, at, strict=True)
    return Row(program.issuing[program.issued.index(value)] for program, value in pairs)


class _Program:
    """The nodes of one group of ranks, and a number for what each of them computes, the same in all groups."""

    def __init__(self, nodes: Sequence[Item], known: dict[str, int]) -> None:
        self.known = known
        self.scopes = grouped(nodes, scope_of)
        self.bodies = _bodies(self.scopes)
        self.values: dict[str, int] = {}
        inner_first = sorted(nodes, key=lambda node: scope_of(node).count("/"), reverse=True)
        for node in inner_first:
            text = self._text(node)
            self.values[node.about] = known.setdefault(text, len(known))
        self.issuing = [node for node in self.scopes.get("", ()) if self._issues(node)]
        self.issued = [self.values[node.about] for node in self.issuing]

    def _text(self, node: Item) -> str:
        """Equal for nodes that compute the same: with numbers of values in place of those of nodes."""

        def value_of(reference: re.Match[str]) -> str:
            return f"#{self.values.get(scope_of(node) + reference[0])}"

        fields = node.fields
        called = REFERENCE.sub(value_of, f"{unnumbered(fields['target'])}({fields['args']})")
        inside = [self.values[one.about] for one in self.bodies.get(node.about, ())]
        return f"{fields['op']} {called} {fields['value']} {inside}"

    def _issues(self, node: Item) -> bool:
        """True for a collective, and for a higher-order op with one in the first subgraph that it is given."""
        if "collective" in node.notes:
            return True
        if not node.fields["target"].startswith(_HIGHER_ORDER):
            return False
        forward = find(node.notes["reads"].split(), lambda read: read in self.bodies)
        return any("collective" in one.notes for one in self.bodies.get(forward or "", ()))


def _bodies(scopes: Mapping[str, Sequence[Item]]) -> dict[str, Sequence[Item]]:
    """Node that stands for a subgraph -> the nodes of that; empty where they cannot be told apart."""
    standing = [node.about for node in scopes.get("", ()) if is_body(node)]
    inner = [nodes for scope, nodes in scopes.items() if scope.count("/") == 1]
    return dict(zip(standing, inner, strict=True)) if len(standing) == len(inner) else {}
