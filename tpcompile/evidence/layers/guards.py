"""Guards of one compile -> one item each; the guard on the process state becomes one item per setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.groups.by_rank import Groups
from tpcompile.evidence.iterables import differ, find, first_answer
from tpcompile.evidence.layers import process_settings as state
from tpcompile.evidence.layers.equivalent import in_guards
from tpcompile.evidence.layers.graph import first_nodes
from tpcompile.evidence.layers.inputs import requires_grad_cause, shared_cause
from tpcompile.evidence.layers.row_text import spoken
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, LayerSpec, in_one_part
from tpcompile.evidence.records import CompileRecord, Guard, Item, ItemKind, Layer, UserLine
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
        yield from _settings(guard) or [_item(guard)]


def _settings(guard: Guard) -> list[Item]:
    """The settings that the guard on the process state checks."""
    settings = state.settings_of(guard.expression) if guard.type == "GLOBAL_STATE" else {}
    return [Item(kind=ItemKind.SETTING, about=name, fields={"value": value}) for name, value in settings.items()]


def _item(guard: Guard) -> Item:
    notes = parts_of(guard)
    # By what is guarded, so that TRUE_MATCH on one rank and FALSE_MATCH on a different one are one difference.
    # That two names are one object is a guard on both.
    both = guard.expression if "left" in notes else guard.type
    about = guard.source or notes.get("subject", "") or both
    fields = {"type": guard.type, "expression": guard.expression}
    # A line of torch is not the user's to change; the line of the compiled frame says more.
    return Item(kind=ItemKind.GUARD, about=about, fields=fields, notes=notes, line=users(guard.line))


def _parts(compile_: CompileRecord) -> Sequence[str]:
    return in_one_part(is_observed=bool(compile_.guards))


def _explain(difference: Difference) -> Explanation:
    return first_answer((_setting, _arranged, _one_object, _tensor, _value), difference) or _one_sided(difference)


def _one_sided(difference: Difference) -> Explanation:
    row = _of_user(difference.rows)
    return Explanation(_checked(row), Directness.ONE_SIDED, row, guard=row)


def _setting(difference: Difference) -> Explanation | None:
    """A setting of the process: the same cause as when a guard on it fails in mid-run."""
    rows = [row for row in difference.rows if row.all_are(_is_setting)]
    if not rows:
        return None
    # The first that has a cause of its own, else the first.
    row = min(rows, key=lambda row: _setting_cause(row) == Cause.PROCESS_STATE)
    return Explanation(_setting_cause(row), Directness.STATE, row)


def _is_setting(item: Item) -> bool:
    return item.kind == ItemKind.SETTING


def _setting_cause(row: Row) -> Cause:
    return state.cause_of(row.first.about)


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
    """A guard `A is B` that some ranks lack: they guard A and B as two tensors."""
    inputs = difference.compile.items(Layer.INPUTS)
    tensors = {item.about for item in inputs.all}
    for row in difference.rows:
        alias = find(row.present, lambda item: "left" in item.notes)
        if alias is None or row.is_full:
            continue
        names = (alias.notes["left"], alias.notes["right"])
        if tensors.issuperset(names):
            return _tied(row, names)
    return None


def _tied(row: Row, names: Sequence[str]) -> Explanation:
    """Ranks that pass one tensor for two arguments are at fault; of tied weights either side may be."""
    cause = shared_cause(names)
    guilty = row.owners if cause == Cause.ALIAS else frozenset[int]()
    return Explanation(cause, Directness.ARRANGED, row, guilty=guilty, guard=row)


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
    rows = [row for row in difference.rows if _has_values(row)]
    if not rows:
        return None
    nodes = first_nodes(difference)
    has_effect = bool(nodes) or difference.compile.differs(Layer.INPUTS)
    if not has_effect:
        return None
    row = _nearest(rows, nodes)
    cause = _value_cause(row, nodes, difference)
    shown = _placed(row, nodes) if nodes else row
    return Explanation(cause, Directness.VALUE, shown, _headline(row), guard=row)


def _headline(row: Row) -> str:
    """What the ranks have, where one of them guards a tensor; else empty, the values are the headline then."""
    if row.has_all("value"):
        return ""
    different = dict.fromkeys(_held(row))
    return f"{spoken(row.first.about)} is {' / '.join(different)}"


def _placed(row: Row, nodes: Row) -> Row:
    """The row at the first nodes that differ, where torch does not say which line asked for the guard."""
    pairs = zip(row.present, _lines_behind(nodes), strict=True)
    return Row(item.at(item.line or line) for item, line in pairs)


def _lines_behind(nodes: Row) -> Sequence[UserLine | None]:
    """The line of each group's node; of nodes in one function the first, which is nearest to the branch."""
    functions = {(line.file, line.function) for line in nodes.lines}
    if len(functions) == 1:
        nearest = min(nodes.lines, key=lambda line: line.line)
        return [nearest] * len(nodes)
    return nodes.map(_line)


def _line(node: Item | None) -> UserLine | None:
    return node.line if node else None


def _has_values(row: Row) -> bool:
    """True when every rank has a value there, and the ranks do not agree on it."""
    held = _held(row)
    return row.is_full and all(held) and differ(held)


def _held(row: Row) -> list[str]:
    """The values that the guards hold; a guarded tensor counts as one, since on some ranks it may be None."""
    return [_value_of(item.notes) for item in row.present]


def _value_of(notes: Mapping[str, str]) -> str:
    default = "a tensor" if "keys" in notes else ""
    return notes.get("value", default)


def _nearest(rows: Sequence[Row], nodes: Row) -> Row:
    """The guard that the line of the first nodes that differ asked for, else the first on a value of the user's."""
    places = _places(nodes)
    return find(rows, lambda row: places & _places(row)) or _of_user(rows)


def _places(row: Row) -> set[tuple[str, int]]:
    """Name of the file, and line: torch may have cut the front of the path."""
    return {(line.file.rpartition("/")[2], line.line) for line in row.lines}


def _of_user(rows: Sequence[Row]) -> Row:
    """The first row that is about something of the user's."""
    return min(rows, key=lambda row: row.first.about.startswith(_INTERNAL))


def _value_cause(row: Row, nodes: Row, difference: Difference) -> Cause:
    """The rank itself, when every rank's value is its own number; else a value that differs."""
    if not _is_rank(row, difference):
        return Cause.PYTHON_VALUE
    if _is_same_call(nodes):
        return Cause.RANK_CONSTANT
    return Cause.RANK_BRANCH


def _is_same_call(nodes: Row) -> bool:
    """True for the same op on the same line on all ranks."""
    lines = {(line.file, line.line) for line in nodes.lines}
    return len(lines) <= 1 and nodes.agree_in(lambda item: item.fields.get("target"))


def _is_rank(row: Row, difference: Difference) -> bool:
    """True when every rank's guard holds its own rank, or its place in the group."""
    values = [{value.strip("b'\"")} for value in _held(row)]
    return values in (_texts(difference.groups), _texts(difference.compile.coordinates()))


def _texts(numbers: Groups) -> list[set[str]]:
    """The numbers of each group, as text."""
    return [set(map(str, own)) for own in numbers]


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


SPEC = LayerSpec(explain=_explain, items=_items, parts=_parts, follow=in_guards, is_ordered=False)
