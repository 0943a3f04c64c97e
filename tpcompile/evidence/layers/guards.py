"""Guards of one compile -> one item each; the guard on the state of the process becomes one per setting."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tpcompile.evidence import state
from tpcompile.evidence.bygroup import Row
from tpcompile.evidence.byrank import Groups
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.headline import spoken
from tpcompile.evidence.layers.graph import first_nodes
from tpcompile.evidence.layers.inputs import requires_grad_cause, shared_cause
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, Followed, LayerSpec, in_one_part
from tpcompile.evidence.parametric import uneven_shards
from tpcompile.evidence.records import CompileRecord, Guard, Item, ItemKind, Layer
from tpcompile.evidence.several import differ, find, first_answer
from tpcompile.evidence.shardbounds import bounds_in_guards
from tpcompile.evidence.text.guards import parts_of
from tpcompile.evidence.text.lines import users

_TYPES = frozenset({"TYPE_MATCH", "CLASS_MATCH"})
_SUBCLASSES = re.compile(r"AsyncCollectiveTensor|DTensor")
_DYNAMIC = "None"
"""In the guard on a tensor, a size that may be any."""
_INTERNAL = ("G['__import_torch", "G['__builtins", "___", "torch.")
"""How a source begins that is not the user's."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for guard in compile_.guards:
        yield from _settings(guard) or [_item(guard)]


def _settings(guard: Guard) -> list[Item]:
    """The settings that the guard on the state of the process holds."""
    settings = state.settings_of(guard.expression) if guard.type == "GLOBAL_STATE" else {}
    return [Item(kind=ItemKind.SETTING, about=name, fields={"value": value}) for name, value in settings.items()]


def _item(guard: Guard) -> Item:
    notes = parts_of(guard)
    # By what is guarded, so that TRUE_MATCH here and FALSE_MATCH there are one difference.
    about = guard.source or notes.get("subject", "") or guard.type
    fields = {"type": guard.type, "expression": guard.expression}
    # Nobody can change a line of torch; the line of the compiled frame says more.
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
    rows = [row for row in difference.rows if row.all_are(lambda item: item.kind == ItemKind.SETTING)]
    if not rows:
        return None
    # The first that has a cause of its own, or else the first.
    row = min(rows, key=lambda row: state.cause_of(row.first.about) == Cause.PROCESS_STATE)
    return Explanation(state.cause_of(row.first.about), Directness.STATE, row)


def _arranged(difference: Difference) -> Explanation | None:
    """Keys of a dict or elements of a set in a different order."""
    for row in difference.rows_with("order"):
        cause = Cause.DICT_ORDER if row.first.notes["order"] == "dict" else Cause.SET_ORDER
        if cause == Cause.SET_ORDER or _is_permuted(difference, row.first.notes["container"]):
            return Explanation(cause, Directness.ARRANGED, row, guard=row)
    return None


def _is_permuted(difference: Difference, container: str) -> bool:
    """True when all ranks have the same keys: other keys are another dict, not another order."""
    elements = difference.compile.items(Layer.GUARDS).only(lambda guard: guard.notes.get("container") == container)
    keys = elements.each(lambda guard: guard.notes["value"])
    return not keys.differ(lambda own: tuple(sorted(own)))


def _one_object(difference: Difference) -> Explanation | None:
    """`A is B` where others guard A and B as two tensors."""
    tensors = {item.about for item in difference.compile.items(Layer.INPUTS).all}
    for row in difference.rows:
        same = find(row.notes("same"), bool) or ""
        names = same.split(" is ")
        if not row.is_full and tensors.issuperset(names):
            return _tied(row, names)
    return None


def _tied(row: Row, names: Sequence[str]) -> Explanation:
    """Which ranks should tie their weights nobody knows; who passes one tensor twice is known."""
    cause = shared_cause(names)
    guilty = row.owners if cause == Cause.ALIAS else frozenset[int]()
    return Explanation(cause, Directness.ARRANGED, row, guilty=guilty, guard=row)


def _tensor(difference: Difference) -> Explanation | None:
    """A tensor whose dispatch keys or requires_grad differ; its shape and dtype are the inputs'."""
    for row in difference.rows_with("keys"):
        if row.differs_in_note("requires_grad"):
            return Explanation(requires_grad_cause(row.first.about), Directness.FED, row, guard=row)
        if row.differs_in_note("keys"):
            return Explanation(Cause.DISPATCH_KEY, Directness.FED, row, guard=row)
    return None


def _value(difference: Difference) -> Explanation | None:
    """A Python value that all ranks guard, each its own: it says why the programs differ, when they do."""
    rows = [row for row in difference.rows if _has_values(row)]
    nodes = first_nodes(difference)
    is_explained = bool(nodes) or difference.compile.differs(Layer.INPUTS)
    if not rows or not is_explained:
        return None
    row = _nearest(rows, nodes)
    says = "" if row.has_all("value") else f"{spoken(row.first.about)} is {' / '.join(dict.fromkeys(_held(row)))}"
    shown = _placed(row, nodes) if nodes else row
    return Explanation(_value_cause(row, nodes, difference), Directness.VALUE, shown, says, guard=row)


def _placed(row: Row, nodes: Row) -> Row:
    """The row at the first nodes that differ, where torch does not say who asked for the guard.

    Behind a branch a rank is further down in the function: of its lines the first is nearest to what it asked.
    """
    lines = [node.line if node else None for node in nodes]
    if len({(line.file, line.function) for line in nodes.lines}) == 1:
        lines = [min(nodes.lines, key=lambda line: line.line)] * len(nodes)
    return Row(item and item.at(item.line or line) for item, line in zip(row, lines, strict=True))


def _has_values(row: Row) -> bool:
    """True when every rank guards what it has there, each something different."""
    held = _held(row)
    return row.is_full and all(held) and differ(held)


def _held(row: Row) -> list[str]:
    """The values that guards compare with; a tensor is one, beside None or a number."""
    return [item.notes.get("value", "a tensor" if "keys" in item.notes else "") for item in row.present]


def _nearest(rows: Sequence[Row], nodes: Row) -> Row:
    """The guard asked for on the line of the first nodes that differ, or else the first on a value of the user's."""
    places = _places(nodes)
    return find(rows, lambda row: places & _places(row)) or _of_user(rows)


def _places(row: Row) -> set[tuple[str, int]]:
    """Name of the file and line: torch may have cut the front of the path."""
    return {(line.file.rpartition("/")[2], line.line) for line in row.lines}


def _of_user(rows: Sequence[Row]) -> Row:
    """The first row that is about something of the user's."""
    return min(rows, key=lambda row: row.first.about.startswith(_INTERNAL))


def _value_cause(row: Row, nodes: Row, difference: Difference) -> Cause:
    """The rank itself, when each rank's value is its own number; else a value that differs."""
    if not _is_rank(row, difference):
        return Cause.PYTHON_VALUE
    return Cause.RANK_CONSTANT if _is_same_call(nodes) else Cause.RANK_BRANCH


def _is_same_call(nodes: Row) -> bool:
    """True for the same op on the same line on all ranks."""
    lines = {(line.file, line.line) for line in nodes.lines}
    return len(lines) <= 1 and nodes.agree_in(lambda item: item.fields.get("target"))


def _is_rank(row: Row, difference: Difference) -> bool:
    """True when every rank compares with its own rank, or with its place in the group."""
    values = [{value.strip("b'\"")} for value in _held(row)]
    return values in (_texts(difference.groups), _texts(difference.compile.coordinates()))


def _texts(numbers: Groups) -> list[set[str]]:
    """The numbers of each group."""
    return [set(map(str, own)) for own in numbers]


def _checked(row: Row) -> Cause:
    """Cause of a guard that differs under equal graphs."""
    types = row.distinct(lambda item: item.fields.get("type"))
    is_of_subclass = any(_SUBCLASSES.search(item.says) for item in row.present)
    if is_of_subclass and types & _TYPES:
        return Cause.TENSOR_SUBCLASS
    sizes = row.notes("size")
    if differ(sizes) and _DYNAMIC in " ".join(sizes):
        return Cause.AUTOMATIC_DYNAMIC
    if "GRAD_MODE" in types:
        return Cause.GRAD_MODE
    return Cause.GUARD_ONLY


def _healthy(difference: Difference) -> Followed:
    """Guards that follow the rank's coordinate, by what they are."""
    shards, bounds = uneven_shards(difference), bounds_in_guards(difference)
    says = filter(None, [shards.says, bounds.says])
    return difference.following([*shards.rows, *bounds.rows], "; ".join(says))


SPEC = LayerSpec(layer=Layer.GUARDS, explain=_explain, items=_items, parts=_parts, follow=_healthy, is_ordered=False)
