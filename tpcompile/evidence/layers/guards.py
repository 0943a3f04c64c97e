"""Guards of one compile -> one item each; the guard on the process state becomes one item per setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.iterables import differ, find, first_answer
from tpcompile.evidence.layers import process_settings as state
from tpcompile.evidence.layers.equivalent import in_guards
from tpcompile.evidence.layers.graph import first_nodes
from tpcompile.evidence.layers.inputs import requires_grad_cause, shared_cause
from tpcompile.evidence.layers.row_text import spoken
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, Guard, Item, ItemKind, Layer
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.text.guards import parts_of
from tpcompile.evidence.text.lines import users

_TYPES = frozenset({"TYPE_MATCH", "CLASS_MATCH"})
_SUBCLASSES = re.compile(r"AsyncCollectiveTensor|DTensor")
_DYNAMIC = "None"
"""How the guard on a tensor prints a dynamic size."""
_INTERNAL = ("G['__import_torch", "G['__builtins", "___", "torch.")
"""Prefixes of a source that is not the user's."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for guard in compile_.guards:
        is_of_state = guard.type == "GLOBAL_STATE"
        settings = state.settings_of(guard.expression) if is_of_state else {}
        for name, value in settings.items():
            yield Item(kind=ItemKind.SETTING, about=name, fields={"value": value})
        if not settings:
            yield _item(guard)


def _item(guard: Guard) -> Item:
    notes = parts_of(guard)
    about = guard.source or notes.get("subject")
    if not about:
        # That two names are one object is a guard on both.
        about = guard.expression if "left" in notes else guard.type
    # By what is guarded, so that TRUE_MATCH on one rank and FALSE_MATCH on a different one are one difference.
    fields = {"type": guard.type, "expression": guard.expression}
    # A line of torch is not the user's to change; the line of the compiled frame says more.
    return Item(kind=ItemKind.GUARD, about=about, fields=fields, notes=notes, line=users(guard.line))


def _explain(difference: Difference) -> Explanation:
    found = first_answer((_setting, _arranged, _one_object, _tensor, _value), difference)
    if found is not None:
        return found
    row = _of_user(difference.rows)
    return Explanation(_checked(row), Directness.ONE_SIDED, row, guard=row)


def _setting(difference: Difference) -> Explanation | None:
    """The first setting of the process with a cause of its own, else the first; the cause as when its guard fails."""
    found: list[Explanation] = []
    for row in difference.rows:
        is_setting = row.all_are(lambda item: item.kind == ItemKind.SETTING)
        if is_setting:
            cause = state.cause_of(row.first.about)
            found.append(Explanation(cause, Directness.STATE, row))
    return min(found, key=lambda one: one.cause == Cause.PROCESS_STATE, default=None)


def _arranged(difference: Difference) -> Explanation | None:
    """Keys of a dict or elements of a set in a different order."""
    for row in difference.rows_with("order"):
        notes = row.first.notes
        if notes["order"] == "set":
            return Explanation(Cause.SET_ORDER, Directness.ARRANGED, row, guard=row)
        if _is_permuted(difference, notes["container"]):
            return Explanation(Cause.DICT_ORDER, Directness.ARRANGED, row, guard=row)
    return None


def _is_permuted(difference: Difference, container: str) -> bool:
    """True when all ranks have the same keys: with different keys it is a different dict, not a different order."""
    elements = difference.compile.items(Layer.GUARDS).only(lambda guard: guard.notes.get("container") == container)
    keys = elements.each(lambda guard: guard.notes["value"])
    return not keys.differ(lambda own: tuple(sorted(own)))


def _one_object(difference: Difference) -> Explanation | None:
    """A guard `A is B` that some ranks lack: they guard A and B as two tensors.

    Ranks that pass one tensor for two arguments are at fault; of tied weights either side may be.
    """
    inputs = difference.compile.items(Layer.INPUTS)
    tensors = {item.about for item in inputs.all}
    for row in difference.rows:
        alias = find(row.present, lambda item: "left" in item.notes)
        if alias is None or row.is_full:
            continue
        names = (alias.notes["left"], alias.notes["right"])
        if tensors.issuperset(names):
            cause = shared_cause(names)
            guilty = row.owners if cause == Cause.ALIAS else frozenset[int]()
            return Explanation(cause, Directness.ARRANGED, row, guilty=guilty, guard=row)
    return None


def _tensor(difference: Difference) -> Explanation | None:
    """A tensor whose dispatch keys or requires_grad differ; shape and dtype are compared in the inputs layer."""
    for row in difference.rows_with("keys"):
        if row.differs_in_note("requires_grad"):
            cause = requires_grad_cause(row.first.about)
            return Explanation(cause, Directness.FED, row, guard=row)
        if row.differs_in_note("keys"):
            return Explanation(Cause.DISPATCH_KEY, Directness.FED, row, guard=row)
    return None


def _value(difference: Difference) -> Explanation | None:
    """A Python value that every rank guards and that differs: the reason why programs or inputs differ."""
    rows: list[Row] = []
    for row in difference.rows:
        held = _held(row)
        if row.is_full and all(held) and differ(held):
            rows.append(row)
    nodes = first_nodes(difference)
    has_effect = bool(nodes) or difference.compile.differs(Layer.INPUTS)
    if not rows or not has_effect:
        return None
    # The guard that the line of the first nodes that differ asked for, else the first on a value of the user's.
    places = _places(nodes)
    row = find(rows, lambda row: places & _places(row)) or _of_user(rows)
    says = ""  # the values are the headline, unless one of them is a tensor
    if not row.has_all("value"):
        says = f"{spoken(row.first.about)} is {' / '.join(dict.fromkeys(_held(row)))}"
    cause = _value_cause(row, nodes, difference)
    shown = _placed(row, nodes) if nodes else row
    return Explanation(cause, Directness.VALUE, shown, says, guard=row)


def _placed(row: Row, nodes: Row) -> Row:
    """The row at the first nodes that differ, where torch does not say which line asked for the guard.

    Nodes in one function are shown at the first of them, which is nearest to the branch.
    """
    functions = {(line.file, line.function) for line in nodes.lines}
    nearest = None
    if len(functions) == 1:
        nearest = min(nodes.lines, key=lambda line: line.line)
    placed: list[Item] = []
    for item, node in zip(row.present, nodes, strict=True):
        line = nearest
        if node and not nearest:
            line = node.line
        placed.append(item.changed(line=item.line or line))
    return Row(placed)


def _held(row: Row) -> list[str]:
    """The values that the guards hold; a guarded tensor counts as one, since on some ranks it may be None."""
    notes = [item.notes for item in row.present]
    return [own.get("value", "a tensor" if "keys" in own else "") for own in notes]


def _places(row: Row) -> set[tuple[str, int]]:
    """Name of the file, and line: torch may have cut the front of the path."""
    return {(line.file.rpartition("/")[2], line.line) for line in row.lines}


def _of_user(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.first.about.startswith(_INTERNAL))


def _value_cause(row: Row, nodes: Row, difference: Difference) -> Cause:
    """The rank itself, when every rank's value is its own rank or its place in the group; else a value that differs."""
    values = [{value.strip("b'\"")} for value in _held(row)]
    numbers = (difference.groups, difference.compile.coordinates())
    is_rank = values in [[set(map(str, own)) for own in groups] for groups in numbers]
    if not is_rank:
        return Cause.PYTHON_VALUE
    lines = {(line.file, line.line) for line in nodes.lines}
    targets = nodes.distinct(lambda item: item.fields.get("target"))
    is_same_call = nodes.is_full and len(targets) == 1
    if is_same_call and len(lines) <= 1:
        return Cause.RANK_CONSTANT
    return Cause.RANK_BRANCH


def _checked(row: Row) -> Cause:
    """Cause of a guard that differs under equal graphs."""
    types = row.distinct(lambda item: item.fields.get("type"))
    is_on_type = not types.isdisjoint(_TYPES)
    is_of_subclass = any(_SUBCLASSES.search(item.says) for item in row.present)
    if is_on_type and is_of_subclass:
        return Cause.TENSOR_SUBCLASS
    sizes = row.notes("size")
    has_dynamic = _DYNAMIC in " ".join(sizes)
    if has_dynamic and differ(sizes):
        return Cause.AUTOMATIC_DYNAMIC
    if "GRAD_MODE" in types:
        return Cause.GRAD_MODE
    return Cause.GUARD_ONLY


SPEC = LayerSpec(
    explain=_explain,
    items=_items,
    parts=lambda compile_: in_one_part(is_observed=bool(compile_.guards)),
    follow=in_guards,
    is_ordered=False,
)
