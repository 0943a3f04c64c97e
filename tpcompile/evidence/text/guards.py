"""Text of a guard tree (`dynamo_cpp_guards_str`) -> guards as fields.

The text is parsed, not hashed: ids, addresses, paths and comments differ between ranks and torch versions; the type,
source and expression of a guard do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from tpcompile.evidence.records import Guard, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.comments import comment_line, split_comments
from tpcompile.evidence.text.group_names import Place, with_roles
from tpcompile.evidence.text.lines import with_whole_path
from tpcompile.evidence.text.normalise import GroupRoles

_GUARD = re.compile(r"^(?P<bars>[| ]*)\+- (?P<type>\w+): (?P<rest>.*)$")
_MANAGER = re.compile(r"^(?P<bars>[| ]*)\+- \w*Manager\b.*?: source=(?P<source>.*?), accessed_by=")
_ID_CALL = re.compile(r"(___check_(?:obj_id|type_id|fake_script_type)\((?:(?!___check_).)*?), \d+\)(?=, type=|\s*$)")
_COMPARING = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH", "TRUE_MATCH", "FALSE_MATCH", "LENGTH_CHECK", "LAMBDA_GUARD",
                        "NONE_MATCH", "NOT_NONE_MATCH", "DICT_KEYS_MATCH", "SEQUENCE_LENGTH"})  # fmt: skip
_COMPARED = re.compile(r"^(?P<subject>.+?) (?:==|is) (?P<value>\S.*)$")
_IS = re.compile(r"^(?P<left>[LG]\['\S+) is (?P<right>[LG]\['\S+)$")
_ELEMENT = re.compile(r"^list\((?P<keys>dict\.keys\()?(?P<container>[^()]+)\)?\)\[\d+\]")
"""The n-th key of a dict, or the n-th element of a set; `keys` is empty for a set."""
_VARIABLE = re.compile(r"(?:\.environ|\['environ'\])(?:\._data)?\[b?'(?P<name>[^']+)'\]")
"""An environment variable, also where `environ` was imported by `from os import *`."""
_TENSOR_PARTS = re.compile(
    r"(?>.*?DispatchKeySet\((?P<keys>[^()]*)\))(?>.*?requires_grad=)(?P<requires_grad>\w+)"
    r"(?:, size=\[(?P<size>[\w, ]*)\](?:, stride=\[(?P<stride>[\w, ]*)\])?)?"
)
_HOOK_ID = re.compile(r"(___dict_contains\()\d+(?=, \S*_hooks\w*\)$)")
"""The handle of a hook is a number that the process counts up over all modules."""
_TENSOR_DEVICE = re.compile(r"(check_tensor\((?:(?!check_tensor\().)*?\bdevice=)\d+")
_OF_OFFSET = re.compile(r"^[^#]*\.storage_offset\(\)(?!\s*,)")
"""A bound on the storage offset of a view, or a size that it happens to be equal to; `Eq(L['x'].storage_offset(), 0)`,
which the program asked for, is none."""


def parse_guards(
    text: str, *, roles: GroupRoles, files: Iterable[str] = (), issued: frozenset[Place] = frozenset()
) -> tuple[Guard, ...]:
    """Parse the guard tree of one compile.

    `files` are full paths known from the same compile: torch shortens the paths in guard comments, and a report
    gives the whole path. `issued` is where its graphs communicate.
    """
    known = tuple(sorted(set(files)))
    sources: dict[int, str] = {}
    guards = []
    for text_line in text.splitlines():
        manager = _MANAGER.match(text_line)
        if manager:
            sources[len(manager["bars"])] = normalise.generic(manager["source"])
            continue
        guard = _GUARD.match(text_line)
        if guard is None or guard["type"].endswith("Manager"):
            continue
        if guard["type"] == "LAMBDA_GUARD" and _OF_OFFSET.match(guard["rest"]):
            continue  # where a shard begins in its tensor is the rank's own: at 0, at the size of one shard, ...
        manager_depth = len(guard["bars"]) - 2
        expression, comments = split_comments(guard["rest"])
        guards.append(
            Guard(
                type=guard["type"],
                source=sources.get(manager_depth, ""),
                expression=_expression(expression),
                line=_line(tuple(comments), known),
            )
        )
    return with_roles(guards, roles, issued)


@lru_cache(maxsize=1024)
def _line(comments: tuple[str, ...], known: tuple[str, ...]) -> UserLine | None:
    """The line that comments name, with its whole path: most guards of a compile share a few."""
    line = comment_line(comments)
    return with_whole_path(line, known) if line else None


def _expression(text: str) -> str:
    text = _ID_CALL.sub(r"\1)", text.rstrip())
    text = _HOOK_ID.sub(r"\1ID", text)
    text = _TENSOR_DEVICE.sub(r"\1INDEX", text)
    check, type_is, type_ = text.partition("), type=")
    if type_.startswith("<") and type_.endswith(">"):
        text = f"{check}{type_is}{normalise.objects(type_)}"
    return normalise.generic(normalise.sets(text))


def parts_of(guard: Guard) -> dict[str, str]:
    """The parts of a guard.

    Of a comparison `subject` and `value`; also `order` (`dict` or `set`) and `container` where it is about the n-th
    element, `variable` where it is about the environment, `set` where the value is a set. `left` and `right` of a
    guard that two names are one object. Properties of a checked tensor.
    """
    if guard.type == "TENSOR_MATCH":
        properties = _TENSOR_PARTS.match(guard.expression)
        return properties.groupdict(default="") if properties else {}
    if alias := _IS.match(guard.expression):
        return alias.groupdict()
    compared = _COMPARED.match(guard.expression)
    if compared is None or guard.type not in _COMPARING:
        return {}
    return _comparison(compared["subject"], compared["value"])


def _comparison(subject: str, value: str) -> dict[str, str]:
    parts = {"subject": subject, "value": value}
    if variable := _VARIABLE.search(subject):
        parts["variable"] = variable["name"]
    if value.startswith("{"):
        parts["set"] = value
    if element := _ELEMENT.search(subject):
        parts["order"] = "dict" if element["keys"] else "set"
        parts["container"] = element["container"]
    return parts
