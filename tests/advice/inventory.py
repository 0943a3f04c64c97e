"""Source of the package -> every sentence of advice in it: what a field for advice is given, as the code has it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import tpcompile

PACKAGE = Path(tpcompile.__file__).parent
FIELDS = frozenset({"advice", "fix", "remedy", "suggestion", "do_first"})
"""Fields of findings, violations and reasons that say what to do."""
TABLES = frozenset({"ADVICE", "SUGGESTIONS", "TODO", "FIXES"})
"""Names of tables of advice, with an underscore before them or without."""
_FACT = re.compile(r"\{[^{}]*\}")
_Assigned = dict[str, list[ast.expr]]


def sentences(package: Path = PACKAGE) -> Iterator[tuple[str, str]]:
    """(file, text) of every text that is given to such a field; `{}` stands for what is only known when it is said."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        for text in _given(ast.parse(path.read_text())):
            yield name, text


def _given(module: ast.Module) -> Iterator[str]:
    assigned: _Assigned = defaultdict(list)
    for name, value in _assigned(module):
        assigned[name].append(value)
    for name, values in assigned.items():
        if name.lstrip("_") in TABLES:
            for value in values:
                yield from _texts(value, assigned)
    positions = _positions(module)
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg in FIELDS:
            yield from _texts(node.value, assigned)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            for position in positions.get(node.func.id, ()):
                given = node.args[position : position + 1]
                texts = [_FACT.sub("{}", text) for value in given for text in _texts(value, assigned)]
                yield from (text for text in texts if text != "{}")  # a whole sentence is read where it is filled in
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in FIELDS:
                    yield from _texts(value, assigned)


def _positions(module: ast.Module) -> dict[str, list[int]]:
    """Records of the module -> positions of their fields for advice, which may be given without their names."""
    found = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            fields = [
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            found[node.name] = [number for number, field in enumerate(fields) if field in FIELDS]
    return found


def _assigned(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names of the module and of its functions with what they are assigned."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _texts(value: ast.expr, assigned: Mapping[str, list[ast.expr]]) -> Iterator[str]:
    """The texts that an expression may have."""
    if isinstance(value, ast.Constant):
        if isinstance(value.value, str) and value.value:
            yield value.value
    elif isinstance(value, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in value.values]
        yield "".join(map(str, parts))
    elif isinstance(value, ast.Name):
        others = {name: other for name, other in assigned.items() if name != value.id}
        for found in assigned.get(value.id, ()):
            yield from _texts(found, others)
    elif isinstance(value, ast.IfExp):
        yield from _texts(value.body, assigned)
        yield from _texts(value.orelse, assigned)
    elif isinstance(value, ast.Dict | ast.Tuple):
        for one in value.values if isinstance(value, ast.Dict) else value.elts:
            yield from _texts(one, assigned)
    elif isinstance(value, ast.Subscript):
        yield from _texts(value.value, assigned)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        yield from _texts(value.func.value, assigned)  # `TABLE.get(key, "")`, `f"...".strip()`
