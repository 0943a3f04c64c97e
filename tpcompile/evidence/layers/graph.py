"""Dynamo graphs, graph breaks and failed compiles of one frame -> one item each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tpcompile.evidence.causes import Cause
from tpcompile.evidence.collectives import blamed_line
from tpcompile.evidence.layers.collectives import UNUSED, issued
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, LayerSpec, Row
from tpcompile.evidence.records import CompileRecord, Graph, GraphBreak, Item, ItemKind, Layer, Node, UserLine
from tpcompile.evidence.records.base import known
from tpcompile.evidence.rows import common_keys, keys, rows_of
from tpcompile.evidence.several import differ, first
from tpcompile.evidence.shardbounds import bounds_in_program
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import entered_at
from tpcompile.evidence.text.ranks import ranks_text
from tpcompile.evidence.text.reasons import LIMIT

_ENDS = frozenset({ItemKind.BREAK, ItemKind.FAILURE})
_REFERENCE = re.compile(r"%\d+")
_STRING = re.compile(r"'[^']*'")
_VALUE = re.compile(r"^([\w(]+)(\[[^\]]*\])(\[[^\]]*\])?")
"""What torch prints of a tensor: `f32[8, 16][16, 1]cpu`."""
_COLLECTIVE = re.compile(r"^torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem)\.(?!wait_tensor)\w+")
_METADATA = (Cause.DTYPE, Cause.SHAPE, Cause.STRIDE)
"""Cause of a difference in each part of that."""
_SAYS_MORE = frozenset({*_METADATA, Cause.AUTOMATIC_DYNAMIC, Cause.SET_ORDER, Cause.UNUSED_RESULT})
"""Causes of a program that explain why its collectives differ."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for graph in compile_.graphs:
        if graph.kind == "dynamo":
            yield from graph_items(graph)
    yield from map(_break_item, compile_.breaks)
    if compile_.failure:
        line = compile_.failure_line or entered_at(compile_.line, compile_.stack)
        fields = {"error": compile_.failure}
        yield Item(kind=ItemKind.FAILURE, about="compile failed", fields=fields, line=line)


def graph_items(graph: Graph) -> Iterator[Item]:
    """Items of one FX graph, a node each, in order."""
    for nodes in graph.scopes:
        for index in range(len(nodes)):
            yield _node_item(nodes, index)


def _node_item(nodes: Sequence[Node], index: int) -> Item:
    """Everything of a node that counts; its constants and the nodes it reads also apart."""
    node = nodes[index]
    args = ", ".join([*node.args, *(f"{key}={value}" for key, value in node.kwargs)])
    reads = [node.scope + reference for reference in _REFERENCE.findall(args)]
    notes = {"constants": _REFERENCE.sub("%", args), "reads": " ".join(reads)}
    if _COLLECTIVE.match(node.target):
        notes |= {"collective": "yes", "group": _group(node), "numbers": _STRING.sub("", notes["constants"])}
    return Item(
        kind=ItemKind.NODE,
        about=f"{node.scope}%{index}",
        fields={"op": node.op, "target": node.target, "args": args, "value": node.value},
        notes=notes,
        line=blamed_line(list(nodes), index),
    )


def _group(node: Node) -> str:
    return " ".join(arg for arg in node.arguments if arg.startswith("group:"))


def _break_item(found: GraphBreak) -> Item:
    where = f"{normalise.short_path(found.line.file)}:{found.line.line}" if found.line else "?"
    about = f"graph break at {where}"
    return Item(kind=ItemKind.BREAK, about=about, fields={"reason": found.reason}, line=found.line)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """A frame without a graph is evidence too, this rank compiled nothing of it; unless its log ends before."""
    return ("",) if compile_.graphs or not compile_.is_cut else ()


def _explain(difference: Difference) -> Explanation:
    found = _ended(difference) or _with_collectives(difference)
    return replace(found, guard=_guard_behind(difference))


def _guard_behind(difference: Difference) -> Row:
    """The first guard that all ranks have, each their own."""
    if not difference.compile.differs(Layer.GUARDS):
        return Row()
    rows = rows_of(difference.compile.items(Layer.GUARDS), is_ordered=False)
    return first(row for row in rows if all(row.notes("value"))) or Row()


def _with_collectives(difference: Difference) -> Explanation:
    """The program, unless the collectives that it issues say more."""
    program, collectives = _program(difference), issued(difference)
    if collectives is None or program.cause in _SAYS_MORE:
        return program
    is_same = program.cause == Cause.COLLECTIVE_SIZES == collectives.cause
    return program if is_same else collectives


def _ended(difference: Difference) -> Explanation | None:
    """Breaks and failures that not all ranks have: they end a graph early, what comes later is missing."""
    ends = tuple(tuple(filter(_is_end, group)) for group in difference.items)
    everywhere = common_keys(ends)
    own = Row(first(end for end in group if end.key not in everywhere) for group in ends)
    return Explanation(_end_cause(own.first), Directness.ENDED, own, guilty=own.owners) if own.present else None


def _is_end(item: Item) -> bool:
    return item.kind in _ENDS


def _end_cause(item: Item) -> Cause:
    if item.kind == ItemKind.BREAK:
        return Cause.GRAPH_BREAK
    is_limit = item.fields["error"].startswith(LIMIT)
    return Cause.RECOMPILE_LIMIT if is_limit else Cause.COMPILE_FAILED


def _program(difference: Difference) -> Explanation:
    row = _shown(difference)
    cause = _cause(row)
    if cause == Cause.RANK_BRANCH and _is_dropped(difference):
        return _unused(difference, row)
    iterated = _set_behind(difference, row) if cause in (Cause.RANK_BRANCH, Cause.RANK_CONSTANT) else None
    if iterated is not None:
        columns = zip(*difference.items, strict=True)
        reordered = next(column for column in columns if differ(map(_op, column)))
        return Explanation(Cause.SET_ORDER, Directness.ARRANGED, Row(_in_loop(item, iterated) for item in reordered))
    if differ(difference.compile.is_symbolic()):
        return _symbolic(difference)
    directness = _DIRECTNESS.get(cause, Directness.PROGRAM)
    return Explanation(cause, directness, row, hangs=directness == Directness.COLLECTIVE)


def _symbolic(difference: Difference) -> Explanation:
    """A size that is a symbol on some ranks only: everything made from it differs, so no node says more."""
    pairs = zip(difference.groups, difference.compile.is_symbolic(), strict=True)
    ranks = [rank for group, is_symbolic in pairs if is_symbolic for rank in group]
    says = f"an input has a dynamic size on rank {ranks_text(ranks)} only"
    nothing = Row(None for _ in difference.groups)
    return Explanation(Cause.AUTOMATIC_DYNAMIC, Directness.FED, nothing, says)


_DIRECTNESS = {
    Cause.GROUP: Directness.COLLECTIVE,
    Cause.REDUCE_OP: Directness.COLLECTIVE,
    Cause.COLLECTIVE_SIZES: Directness.COLLECTIVE,
    Cause.AUTOMATIC_DYNAMIC: Directness.FED,
    **dict.fromkeys(_METADATA, Directness.RESULT),
}
"""How directly a node that differs names what happened; a node by default is just the program."""


def _shown(difference: Difference) -> Row:
    """The first node that does something: inputs and outputs follow from the nodes that use them."""
    calls = [row for row in difference.rows if all(map(_is_call, row.present))]
    return calls[0] if calls else difference.rows[0]


def _is_call(item: Item) -> bool:
    return item.fields.get("op") not in ("placeholder", "output")


def _cause(row: Row) -> Cause:
    """Cause of a node that differs."""
    if not row.is_full or row.differs_in("op", "target"):
        return Cause.RANK_BRANCH
    if not row.differs_in("args"):
        return _of_values(row)
    if not row.differs_in_note("constants"):
        return Cause.RANK_BRANCH  # the same op reads other tensors
    return _of_collective(row) if any(row.notes("collective")) else Cause.RANK_CONSTANT


def _of_collective(row: Row) -> Cause:
    if row.differs_in_note("group"):
        return Cause.GROUP
    return Cause.COLLECTIVE_SIZES if row.differs_in_note("numbers") else Cause.REDUCE_OP


def _of_values(row: Row) -> Cause:
    """The same call with another result: the metadata of what it reads differs."""
    values = [node.fields["value"] for node in row.present]
    if differ("#" in value for value in values):
        return Cause.AUTOMATIC_DYNAMIC
    parts = [found for value in values for found in _VALUE.findall(value)]
    if len(parts) < len(values):
        return Cause.UNKNOWN
    causes = [cause for cause, *column in zip(_METADATA, *parts, strict=True) if differ(column)]
    if not causes:
        return Cause.UNKNOWN
    return Cause.COLLECTIVE_SIZES if any(row.notes("collective")) else causes[0]


def _is_dropped(difference: Difference) -> bool:
    """True when the forward issues the same collectives, and one group never reads a result.

    The backward may differ then: where it recomputes the forward, it recomputes what is read.
    """
    forward = [list(filter(_is_forward, group)) for group in difference.compile.items(Layer.COLLECTIVES)]
    dropped = [tuple(UNUSED in item.notes for item in group) for group in forward]
    return differ(dropped) and not differ(map(keys, forward))


def _is_forward(collective: Item) -> bool:
    return collective.about == "forward"


def _unused(difference: Difference, row: Row) -> Explanation:
    """The collective whose result one group drops, where only some groups drop any."""
    collectives = difference.compile.items(Layer.COLLECTIVES)
    dropped = Row(first(item for item in group if UNUSED in item.notes) for group in collectives)
    if dropped.is_full:
        return Explanation(Cause.UNUSED_RESULT, Directness.COLLECTIVE, row)
    return Explanation(Cause.UNUSED_RESULT, Directness.COLLECTIVE, dropped, guilty=dropped.owners)


def _set_behind(difference: Difference, row: Row) -> UserLine | None:
    """Where a set is iterated, when the ranks run the same ops in a different order there and no rank is read.

    In the function of the ops, or else in another one of that file: the loop may call what does the work.
    """
    if difference.compile.rank_reads() or not _is_permuted(difference):
        return None
    guards = itertools.chain.from_iterable(difference.compile.items(Layer.GUARDS))
    loops = known(guard.line for guard in guards if "set" in guard.notes)
    near = [loop for loop in loops if _is_near(loop, row)]
    functions = {(line.file, line.function) for line in row.lines}
    within = [loop for loop in near if _is_in(loop.file, loop.function, functions)]
    return first([*within, *near])


def _is_permuted(difference: Difference) -> bool:
    """True when the ranks run the same ops, of more than one kind, in a different order."""
    ops = [sorted(map(_op, filter(_is_node, group))) for group in difference.items]
    return len(set(ops[0])) > 1 and not differ(map(tuple, ops))


def _is_near(line: UserLine, row: Row) -> bool:
    """True for a line of a file in which the row is; torch may have cut the front of its path."""
    return any(other.file.endswith(line.file) for other in row.lines)


def _in_loop(item: Item, iterated: UserLine) -> Item:
    """The item at the loop over the set, unless it is in that function itself."""
    is_there = item.line is not None and item.line.function == iterated.function
    return item if is_there else item.model_copy(update={"line": iterated})


def _is_node(item: Item) -> bool:
    return item.kind == ItemKind.NODE


def _op(item: Item) -> tuple[str, str, str]:
    return item.fields["op"], item.fields["target"], item.notes["constants"]


def _is_in(file: str, function: str, functions: set[tuple[str, str]]) -> bool:
    """Torch may have cut the front of the path."""
    return any(known == function and whole.endswith(file) for whole, known in functions)


SPEC = LayerSpec(layer=Layer.GRAPH, explain=_explain, items=_items, parts=_parts, follow=bounds_in_program)


def program_rows(difference: Difference) -> tuple[Row, ...]:
    """Rows of the program in the compile of another layer's difference."""
    if not difference.compile.differs(Layer.GRAPH):
        return ()
    return rows_of(difference.compile.items(Layer.GRAPH), is_ordered=True)
