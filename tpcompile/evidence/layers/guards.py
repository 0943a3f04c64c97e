"""Guards of one compile -> one item each; the guard on the state of the process becomes one per setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tpcompile.evidence import state
from tpcompile.evidence.causes import Cause
from tpcompile.evidence.headline import spoken
from tpcompile.evidence.layers.graph import program_rows
from tpcompile.evidence.layers.inputs import PARAMETERS
from tpcompile.evidence.layerspec import Difference, Directness, Explanation, LayerSpec, Row
from tpcompile.evidence.records import CompileRecord, Guard, Item, ItemKind, Layer
from tpcompile.evidence.text.guards import parts_of
from tpcompile.evidence.text.lines import is_library

_TYPES = frozenset({"TYPE_MATCH", "CLASS_MATCH"})
_SUBCLASSES = ("AsyncCollectiveTensor", "DTensor")
_INTERNAL = ("G['__import_torch", "G['__builtins", "___", "torch.")
"""How a source begins that is not the user's."""


def _items(compile_: CompileRecord, _part: str) -> Iterator[Item]:
    for guard in compile_.guards:
        settings = state.settings_of(guard.expression) if guard.type == "GLOBAL_STATE" else {}
        for setting, value in settings.items():
            yield Item(kind=ItemKind.SETTING, about=setting, fields={"value": value})
        if not settings:
            yield _item(guard)


def _item(guard: Guard) -> Item:
    notes = parts_of(guard)
    # By what is guarded, so that TRUE_MATCH here and FALSE_MATCH there are one difference.
    about = guard.source or notes.get("subject", "") or guard.type
    fields = {"type": guard.type, "expression": guard.expression}
    # Nobody can change a line of torch; the line of the compiled frame says more.
    line = guard.line if guard.line and not is_library(guard.line) else None
    return Item(kind=ItemKind.GUARD, about=about, fields=fields, notes=notes, line=line)


def _parts(compile_: CompileRecord) -> Sequence[str]:
    return ("",) if compile_.guards else ()


def _explain(difference: Difference) -> Explanation:
    for witness in (_setting, _arranged, _tensor, _value):
        found = witness(difference)
        if found is not None:
            return found
    row = _of_user(difference.rows)
    return Explanation(_checked(row), Directness.ONE_SIDED, row, guard=row)


def _setting(difference: Difference) -> Explanation | None:
    """A setting of the process: the same cause as when a guard on it fails in mid-run."""
    rows = [row for row in difference.rows if all(item and item.kind == ItemKind.SETTING for item in row)]
    if not rows:
        return None
    causes = [state.cause_of(item.about) for row in rows for item in row[:1] if item]
    named = [pair for pair in zip(causes, rows, strict=True) if pair[0] != Cause.PROCESS_STATE]
    cause, row = named[0] if named else (causes[0], rows[0])
    return Explanation(cause, Directness.STATE, row)


def _arranged(difference: Difference) -> Explanation | None:
    """Tensors that are one object on some ranks, keys of a dict or elements of a set in a different order."""
    for row in difference.rows:
        present = [item for item in row if item is not None and "order" in item.notes]
        if present and len(present) == len(row):
            cause = Cause.DICT_ORDER if present[0].notes["order"] == "dict" else Cause.SET_ORDER
            if cause == Cause.SET_ORDER or _is_permuted(difference, present[0].notes["container"]):
                return Explanation(cause, Directness.ARRANGED, row, guard=row)
    return _one_object(difference)


def _is_permuted(difference: Difference, container: str) -> bool:
    """True when all ranks have the same keys: other keys are another dict, not another order."""
    keys = [
        sorted(item.notes.get("value", "") for item in group if item.notes.get("container") == container)
        for group in difference.compile.items(Layer.GUARDS)
    ]
    return all(group == keys[0] for group in keys)


def _one_object(difference: Difference) -> Explanation | None:
    """`A is B` where others guard A and B as two tensors."""
    tensors = _inputs(difference)
    for row in difference.rows:
        for index, item in enumerate(row):
            if item is None or "same" not in item.notes or None not in row:
                continue
            both = item.notes["same"].split(" is ")
            if not tensors.issuperset(both):
                continue
            is_tied = all(PARAMETERS in name for name in both)
            cause = Cause.TIED_WEIGHTS if is_tied else Cause.ALIAS
            guilty = frozenset({index}) if not is_tied else frozenset[int]()
            return Explanation(cause, Directness.ARRANGED, row, guilty=guilty, guard=row)
    return None


def _inputs(difference: Difference) -> set[str]:
    return {item.about for group in difference.compile.items(Layer.INPUTS) for item in group}


def _tensor(difference: Difference) -> Explanation | None:
    """A tensor whose dispatch keys or requires_grad differ; its shape and dtype are the inputs'."""
    for row in difference.rows:
        items = [item for item in row if item is not None]
        if len(items) < len(row) or "keys" not in items[0].notes:
            continue
        if len({item.notes.get("requires_grad") for item in items}) > 1:
            is_parameter = PARAMETERS in items[0].about
            cause = Cause.FROZEN_PARAMETER if is_parameter else Cause.REQUIRES_GRAD
            return Explanation(cause, Directness.FED, row, guard=row)
        if len({item.notes.get("keys") for item in items}) > 1:
            return Explanation(Cause.DISPATCH_KEY, Directness.FED, row, guard=row)
    return None


def _value(difference: Difference) -> Explanation | None:
    """A Python value that all ranks guard, each its own: it says why the programs differ, when they do."""
    rows = [row for row in difference.rows if _has_values(row)]
    program = program_rows(difference)
    is_explained = bool(program) or difference.compile.differs(Layer.INPUTS)
    if not rows or not is_explained:
        return None
    row = _nearest(rows, program)
    values = " / ".join(dict.fromkeys(_held(item) for item in row if item))
    is_plain = all(item and "value" in item.notes for item in row)
    says = "" if is_plain else f"{spoken(_subject(row))} is {values}"
    shown = _placed(row, program)
    return Explanation(_value_cause(row, program, difference), Directness.VALUE, shown, says, guard=row)


def _placed(row: Row, program: Sequence[Row]) -> Row:
    """The row at the lines of the first nodes that differ, where torch does not say who asked for the guard."""
    nodes = program[0] if program else row
    pairs = zip(row, nodes, strict=True)
    return Row(
        item.model_copy(update={"line": node.line}) if item and node and item.line is None else item
        for item, node in pairs
    )


def _has_values(row: Row) -> bool:
    """True when every rank guards what it has there, each something different."""
    held = [_held(item) if item is not None else "" for item in row]
    return all(held) and len(set(held)) > 1


def _held(item: Item) -> str:
    """The value that a guard compares with; a tensor is one, beside None or a number."""
    return item.notes.get("value", "a tensor" if "keys" in item.notes else "")


def _nearest(rows: Sequence[Row], program: Sequence[Row]) -> Row:
    """The guard asked for on the line of the first node that differs, or else the first on a value of the user's."""
    lines = [item.line for row in program[:1] for item in row if item is not None]
    places = {(line.file.rpartition("/")[2], line.line) for line in lines if line is not None}
    for row in rows:
        asked = [item.line for item in row if item is not None]
        if any(line and (line.file.rpartition("/")[2], line.line) in places for line in asked):
            return row
    return _of_user(rows)


def _of_user(rows: Sequence[Row]) -> Row:
    """The first row that is about something of the user's."""
    own = [row for row in rows if not _subject(row).startswith(_INTERNAL)]
    return own[0] if own else rows[0]


def _subject(row: Row) -> str:
    return next(item.about for item in row if item is not None)


def _value_cause(row: Row, program: Sequence[Row], difference: Difference) -> Cause:
    """The rank itself, when each rank's value is its own number; else a value that differs."""
    if not _is_rank(row, difference):
        return Cause.PYTHON_VALUE
    nodes = [item for row in program[:1] for item in row if item is not None]
    is_same_op = len({item.fields.get("target") for item in nodes}) == 1 and len(nodes) == len(row)
    places = {(node.line.file, node.line.line) for node in nodes if node.line is not None}
    is_same_call = is_same_op and len(places) <= 1
    return Cause.RANK_CONSTANT if is_same_call else Cause.RANK_BRANCH


def _is_rank(row: Row, difference: Difference) -> bool:
    """True when every rank compares with its own rank, or with its place in the group."""
    values = [_held(item).strip("b'\"") for item in row if item is not None]
    return any(_are_equal(values, numbers) for numbers in (difference.groups, difference.compile.coordinates()))


def _are_equal(values: Sequence[str], numbers: Sequence[Sequence[int]]) -> bool:
    pairs = zip(values, numbers, strict=True)
    return all({value} == {str(number) for number in own} for value, own in pairs)


def _checked(row: Row) -> Cause:
    """Cause of a guard that differs under equal graphs."""
    items = [item for item in row if item is not None and item.kind == ItemKind.GUARD]
    is_type = any(item.fields["type"] in _TYPES for item in items)
    says = " ".join(item.fields["expression"] for item in items)
    if is_type and any(name in says for name in _SUBCLASSES):
        return Cause.TENSOR_SUBCLASS
    is_mode = any(item.fields["type"] == "GRAD_MODE" for item in items)
    return Cause.GRAD_MODE if is_mode else Cause.GUARD_ONLY


SPEC = LayerSpec(layer=Layer.GUARDS, explain=_explain, items=_items, parts=_parts, is_ordered=False)
