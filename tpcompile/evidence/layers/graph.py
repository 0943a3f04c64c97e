"""Dynamo graphs, graph breaks and failed compiles of one frame -> one item each."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tpcompile.evidence.compiles.collectives import blamed_line
from tpcompile.evidence.groups.by_group import Items, Row
from tpcompile.evidence.groups.by_rank import ranks_in
from tpcompile.evidence.iterables import differ, find, first, first_answer
from tpcompile.evidence.layers.collectives import UNUSED, issued
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.equivalent import in_program
from tpcompile.evidence.layers.node_text import REFERENCE, called, nodes_in, op_of, read_instead
from tpcompile.evidence.layers.permutations import reordered_collectives, reordered_ops
from tpcompile.evidence.layers.row_text import headline
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, Graph, Item, ItemKind, Layer, Node, UserLine
from tpcompile.evidence.records.base import lines_of
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.lines import entered_at
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.evidence.text.reasons import LIMIT

_ENDS = frozenset({ItemKind.BREAK, ItemKind.FAILURE})
_STRING = re.compile(r"'[^']*'")
_VALUE = re.compile(r"^([\w(]+)(\[[^\]]*\])(\[[^\]]*\])?")
"""A tensor as torch prints it: `f32[8, 16][16, 1]cpu`."""
_COLLECTIVE = re.compile(r"^torch\.ops\.(?:_c10d_functional(?:_autograd)?|symm_mem)\.(?!wait_tensor)\w+")
_PLACES = frozenset({"kernel_idx", "constant_args_idx"})
"""Arguments of a Triton launch in a log: places in a table of the process."""
_NAMES = frozenset({"kernel", "constants"})
"""Arguments that name a Triton launch in a capture; lowered graphs that were loaded from a cache lack them."""
_METADATA = {1: Cause.DTYPE, 2: Cause.SHAPE, 3: Cause.STRIDE}
"""Group of `_VALUE` that differs -> cause."""
_SAYS_MORE = frozenset({*_METADATA.values(), Cause.AUTOMATIC_DYNAMIC, Cause.SET_ORDER, Cause.UNUSED_RESULT})
"""Causes of a program that explain why its collectives differ."""
_MAY_BE_REORDERED = frozenset({Cause.RANK_BRANCH, Cause.RANK_CONSTANT})
"""Causes that a node has too when ranks run the same ops in different orders."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for graph in compile_.graphs_of("dynamo"):
        for item in graph_items(graph):
            yield item.changed(callers=compile_.callers(item.line))
    for found in compile_.breaks:
        where = f"{normalise.short_path(found.line.file)}:{found.line.line}" if found.line else "?"
        about, fields = f"graph break at {where}", {"reason": found.reason}
        yield Item(kind=ItemKind.BREAK, about=about, fields=fields, line=found.line)
    if compile_.failure:
        line = compile_.failure_line or entered_at(compile_.line, compile_.stack)
        fields = {"error": compile_.failure}
        yield Item(kind=ItemKind.FAILURE, about="compile failed", fields=fields, line=line)


def graph_items(graph: Graph) -> Iterator[Item]:
    """Items of one FX graph, a node each, in order."""
    left_out = _PLACES if graph.kind == "dynamo" else _PLACES | _NAMES
    for nodes in graph.scopes:
        yield from (_node_item(nodes, index, left_out) for index in range(len(nodes)))


def _node_item(nodes: Sequence[Node], index: int, left_out: frozenset[str]) -> Item:
    """What is compared of a node; its constants and the nodes that it reads are notes too."""
    node = nodes[index]
    named = [f"{key}={value}" for key, value in node.kwargs if not (node.is_launch and key in left_out)]
    args = ", ".join([*node.args, *named])
    reads = [node.scope + reference for reference in REFERENCE.findall(args)]
    notes = {"constants": REFERENCE.sub("%", args), "reads": " ".join(reads)}
    if node.is_launch:
        notes |= {name: value.strip("'") for name, value in node.kwargs if name == "kernel"}
    if _COLLECTIVE.match(node.target):
        group = " ".join(arg for arg in node.arguments if arg.startswith("group:"))
        notes |= {"collective": "yes", "group": group, "numbers": _STRING.sub("", notes["constants"])}
    return Item(
        kind=ItemKind.NODE,
        about=f"{node.scope}%{index}",
        fields={"op": node.op, "target": node.target, "args": args, "value": node.value},
        notes=notes,
        line=blamed_line(nodes, index),
    )


def _parts(compile_: CompileRecord) -> Sequence[str]:
    """A frame without a graph is observed too: this rank compiled nothing of it. A log that ends early says nothing."""
    is_traced = bool(compile_.graphs_of("dynamo"))
    return in_one_part(is_observed=is_traced or not compile_.is_cut)


def _explain(difference: Difference) -> Explanation:
    found = _ended(difference) or _with_collectives(difference)
    if found.cause == Cause.COMPILE_FAILED:
        failed_on = nodes_in(difference.items.picked(found.guilty))
        if all(failed_on):  # Dynamo gives the backend whole programs only
            found = _failed_in_backend(difference, found)
    return replace(found, guard=_guard_behind(difference))


def _guard_behind(difference: Difference) -> Row:
    """The first guard on a value that every rank has and in which the ranks differ."""
    if not difference.compile.differs(Layer.GUARDS):
        return Row()
    rows = rows_of(difference.compile.items(Layer.GUARDS), is_ordered=False)
    return find(rows, lambda row: row.has_all("value")) or Row()


def _with_collectives(difference: Difference) -> Explanation:
    """The program's explanation, unless that of its collectives says more."""
    program = _program(difference)
    if program.cause in _SAYS_MORE:
        return program
    collectives = issued(difference)
    if collectives is None:
        return program
    causes = {program.cause, collectives.cause}
    if causes == {Cause.COLLECTIVE_SIZES}:
        return program
    return collectives


def _ended(difference: Difference) -> Explanation | None:
    """The graph break or failed compile that some ranks lack: it ends the graph early, and later nodes are missing."""
    ends = difference.items.only(lambda item: item.kind in _ENDS)
    own = Row(ends.own().map(first))
    if not own.present:
        return None
    cause = Cause.GRAPH_BREAK
    if own.first.kind == ItemKind.FAILURE:
        error = own.first.fields["error"]
        is_limit = error.startswith(LIMIT)
        cause = Cause.RECOMPILE_LIMIT if is_limit else Cause.COMPILE_FAILED
    return Explanation(cause, Directness.ENDED, own, guilty=own.owners)


def _failed_in_backend(difference: Difference, failed: Explanation) -> Explanation:
    """What differs in a program that some ranks failed to compile, with the error; the error alone where it agrees."""
    failed = replace(failed, directness=Directness.RAISED, raised=headline(failed.row, difference.groups))
    program = filter(lambda row: ItemKind.FAILURE not in row.distinct(lambda item: item.kind), difference.rows)
    rows = tuple(program)
    if not rows:
        return failed
    found = _program(replace(difference, rows=rows))
    return replace(found, directness=failed.directness, guilty=failed.guilty, raised=failed.raised)


def _program(difference: Difference) -> Explanation:
    row = _first_call(_without_moved(difference.rows))
    node = _Node(difference, row, _cause(row))
    found = first_answer((_dropped, _of_set, _symbolic, _reordered), node)
    if found is not None:
        return found
    directness = _DIRECTNESS.get(node.cause, Directness.PROGRAM)
    hangs = directness == Directness.COLLECTIVE
    return Explanation(node.cause, directness, row, _reads(difference.items, row), hangs=hangs)


def _reads(items: Items, row: Row) -> str:
    """What the same op reads instead, where nothing else differs; else empty, the calls are the headline then."""
    is_same_op = row.agree_in(op_of)
    is_same_value = row.agree_in(lambda item: item.fields["value"])
    if not (is_same_op and is_same_value):
        return ""
    different = ""
    if row.differing(["args"]):
        different = read_instead(items, row)
    return different and f"{called(row.first)} reads {different}"


def _first_call(rows: Sequence[Row]) -> Row:
    """The first row of a call: placeholders are in the order of their first use, the output follows from the calls."""
    others = {"placeholder", "output"}
    found = find(rows, lambda row: row.distinct(lambda item: item.fields.get("op")).isdisjoint(others))
    return found or rows[0]


def _without_moved(rows: Sequence[Row]) -> Sequence[Row]:
    """The rows without those of ops that every group runs, at different places; all rows where none is left."""
    owners: dict[object, set[int]] = defaultdict(set)
    for row in rows:
        if not row.is_full:
            owners[op_of(row.first)] |= row.owners
    left: list[Row] = []
    for row in rows:
        is_moved = len(owners[op_of(row.first)]) == len(row)
        if not is_moved:
            left.append(row)
    return left or rows


@dataclass(frozen=True)
class _Node:
    """The first node that differs and is a call: placeholders and outputs follow from the nodes that use them."""

    difference: Difference
    row: Row
    cause: Cause


def _of_set(node: _Node) -> Explanation | None:
    """The same ops in the iteration order of a set, in code that does not read the rank."""
    difference = node.difference
    if node.cause not in _MAY_BE_REORDERED or difference.compile.rank_reads():
        return None
    moved = reordered_ops(difference.items)
    loop = _set_behind(difference, node.row) if moved else None
    if moved is None or loop is None:
        return None
    in_loop: list[Item] = []
    for item in moved.row.present:
        is_there = item.line is not None and item.line.function == loop.function
        in_loop.append(item if is_there else item.changed(line=loop))
    return Explanation(Cause.SET_ORDER, Directness.ARRANGED, Row(in_loop), moved.says)


def _set_behind(difference: Difference, row: Row) -> UserLine | None:
    """The line that iterates a set: in the function of the ops, else in a loop of their file that calls them."""
    guards = difference.compile.items(Layer.GUARDS)
    loops = lines_of(guards.only(lambda guard: "set" in guard.notes).all)
    in_file: UserLine | None = None
    for loop in loops:
        # torch may have cut the front of the file's path
        functions = [line.function for line in row.lines if line.file.endswith(loop.file)]
        if loop.function in functions:
            return loop
        if functions:
            in_file = in_file or loop
    return in_file


def _reordered(node: _Node) -> Explanation | None:
    """The same collectives on the same values in a different order, or else the same ops."""
    if node.cause not in _MAY_BE_REORDERED:
        return None
    items = node.difference.items
    moved = reordered_collectives(items) or reordered_ops(items)
    if moved is None or moved.of == "reads":
        return None
    cause = Cause.RANK_BRANCH
    if moved.of == "collectives":
        cause = Cause.ORDER_FORWARD
    return Explanation(cause, Directness.PROGRAM, moved.row, moved.says)


def _symbolic(node: _Node) -> Explanation | None:
    """A size that is a symbol on some ranks only: everything made from it differs, so no single node explains it."""
    groups = node.difference.groups
    is_symbolic = node.difference.compile.is_symbolic()
    if not is_symbolic.differ():
        return None
    ranks = ranks_in(groups, is_symbolic.where(bool))
    says = f"an input has a dynamic size on {named_ranks(ranks)} only"
    nothing = Row([None] * len(groups))
    return Explanation(Cause.AUTOMATIC_DYNAMIC, Directness.FED, nothing, says)


_DIRECTNESS = {
    Cause.GROUP: Directness.COLLECTIVE,
    Cause.REDUCE_OP: Directness.COLLECTIVE,
    Cause.BROADCAST_SOURCE: Directness.COLLECTIVE,
    Cause.COLLECTIVE_SIZES: Directness.COLLECTIVE,
    Cause.AUTOMATIC_DYNAMIC: Directness.FED,
    **dict.fromkeys(_METADATA.values(), Directness.RESULT),
}
"""How directly a node with that cause names what happened; `PROGRAM` by default."""


def _cause(row: Row) -> Cause:
    is_same_call = row.agree_in(lambda item: (item.fields["op"], item.fields["target"]))
    if not is_same_call:
        return Cause.RANK_BRANCH
    if not row.differing(["args"]):
        return _of_values(row)
    if not row.differs_in_note("constants"):
        return Cause.RANK_BRANCH  # the same op reads different tensors
    if any(row.notes("collective")):
        return _of_collective(row)
    return Cause.RANK_CONSTANT


def _of_collective(row: Row) -> Cause:
    if row.differs_in_note("group"):
        return Cause.GROUP
    if not row.differs_in_note("numbers"):
        return Cause.REDUCE_OP
    targets = row.values("target")
    is_broadcast = all("broadcast" in target for target in targets)
    if is_broadcast:
        return Cause.BROADCAST_SOURCE
    return Cause.COLLECTIVE_SIZES


def _of_values(row: Row) -> Cause:
    """The same call with a different result: the metadata of what it reads differs."""
    values = row.values("value")
    has_symbol = ["#" in value for value in values]
    if differ(has_symbol):
        return Cause.AUTOMATIC_DYNAMIC
    cause = _of_metadata(values)
    if cause == Cause.UNKNOWN:
        return cause
    is_of_collective = any(row.notes("collective"))
    return Cause.COLLECTIVE_SIZES if is_of_collective else cause


def _of_metadata(values: Sequence[str]) -> Cause:
    """Cause of the first part that differs in what torch prints of the tensors: dtype, shape, stride."""
    tensors = list(filter(None, map(_VALUE.match, values)))
    if len(tensors) < len(values):
        return Cause.UNKNOWN
    for part, cause in _METADATA.items():
        if differ(tensor[part] for tensor in tensors):
            return cause
    return Cause.UNKNOWN


def _dropped(node: _Node) -> Explanation | None:
    """The collective whose result one group never reads, where all ranks issue the same collectives in the forward.

    The backward may still differ: where it recomputes the forward, it recomputes only what is read.
    """
    if node.cause != Cause.RANK_BRANCH:
        return None
    collectives = node.difference.compile.items(Layer.COLLECTIVES)
    forward = collectives.only(lambda item: item.about == "forward")
    issued_there = forward.each(lambda item: item.key)
    dropped_there = forward.each(lambda item: UNUSED in item.notes)
    if issued_there.differ():
        return None
    if not dropped_there.differ():
        return None
    unused = collectives.only(lambda item: UNUSED in item.notes)
    dropped = Row(unused.map(first))
    if dropped.is_full:
        return Explanation(Cause.UNUSED_RESULT, Directness.COLLECTIVE, node.row)
    return Explanation(Cause.UNUSED_RESULT, Directness.COLLECTIVE, dropped, guilty=dropped.owners)


SPEC = LayerSpec(explain=_explain, items=_items, parts=_parts, follow=in_program)


def first_nodes(difference: Difference) -> Row:
    """The first nodes that differ in the compile of this difference; empty where the program agrees."""
    if not difference.compile.differs(Layer.GRAPH):
        return Row()
    rows = rows_of(difference.compile.items(Layer.GRAPH), is_ordered=True)
    return _first_call(rows) if rows else Row()
