"""A line of source -> the names that it reads, and those that it gives a value: `size`; of an attribute, `.scale`."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise

from tpcompile.evidence.timeline.flow import Named

ANY_ATTRIBUTE = "."
"""What `setattr(x, name, value)` gives a value."""
_NOTHING = frozenset[str]()
_LITERAL = 40
"""Most characters of a literal that is shown."""


def read(file: str, line: int) -> frozenset[str]:
    """Names that the statement of a line reads; of an `if` or a loop, those of its first line."""
    return _names(file).get(line, (_NOTHING, _NOTHING))[0]


def assigned(file: str, line: int) -> frozenset[str]:
    """Names that get a value there."""
    return _names(file).get(line, (_NOTHING, _NOTHING))[1]


def touches(changed: Collection[str], wanted: Iterable[str]) -> bool:
    """True where one of the names that got a value is wanted."""
    return any(name in changed or (ANY_ATTRIBUTE in changed and name.startswith(".")) for name in wanted)


def loop_around(file: str, line: int) -> tuple[int, int]:
    """First and last line of the innermost loop that contains a line; 0, 0 where it is in none."""
    around = [lines for lines in _loops(file) if line in lines]
    innermost = min(around, key=len, default=None)
    return (innermost[0], innermost[-1]) if innermost is not None else (0, 0)


def is_loop(file: str, line: int, readable: Collection[str]) -> bool:
    """True for the head of a loop, in a file that may be read."""
    return file in readable and loop_around(file, line)[0] == line


def may_end_loop(file: str, line: int, readable: Collection[str]) -> bool:
    """True for the head of a loop, and for an `if` in it that leaves it, in a file that may be read."""
    if file not in readable:
        return False
    head, _ = loop_around(file, line)
    return head == line or (head > 0 and line in _leaving(file))


def reads_item(file: str, line: int, readable: Collection[str]) -> bool:
    """True for a line in a loop that reads what the loop takes in each pass, in a file that may be read."""
    head, _ = loop_around(file, line) if file in readable else (0, 0)
    return head not in (0, line) and not assigned(file, head).isdisjoint(read(file, line))


def is_handler(file: str, line: int, readable: Collection[str]) -> bool:
    """True for the line of an `except`, in a file that may be read."""
    return file in readable and line in _handlers(file)


def is_yield(file: str, line: int, readable: Collection[str]) -> bool:
    """True for a line that yields a value, in a file that may be read: who took the value decides how it goes on."""
    return file in readable and line in _yields(file)


def decides(file: str, line: int) -> bool:
    """False for a call or an assignment without a condition: what differs there was decided elsewhere."""
    return line not in _plain(file)


def made_at(file: str, line: int) -> int:
    """Of a bare `return name` the last line before it that gives the name a value, or the `if` that decides whether.

    Any other line itself.
    """
    return _made_at(file).get(line, line)


@lru_cache(maxsize=256)
def _made_at(file: str) -> dict[int, int]:
    found: dict[int, int] = {}
    for function in ast.walk(_tree(file)):  # inner functions come later, and count
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        conditions = [node for node in inside if isinstance(node, ast.If)]
        for node in inside:
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
                before = (one.lineno for one in inside if one.lineno < node.lineno)
                made = max((at for at in before if node.value.id in assigned(file, at)), default=node.lineno)
                deciding = [  # one around the return as well decides no value of it
                    one.lineno for one in conditions if made in _lines_of(one) and node.lineno not in _lines_of(one)
                ]
                found[node.lineno] = max(deciding, default=made)
    return found


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


@lru_cache(maxsize=256)
def _plain(file: str) -> frozenset[int]:
    found: set[int] = set()
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.AnnAssign):
            has_condition = any(isinstance(part, ast.IfExp | ast.BoolOp | ast.comprehension) for part in ast.walk(node))
            found.update([] if has_condition else range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(found)


@lru_cache(maxsize=256)
def _leaving(file: str) -> frozenset[int]:
    """Lines of each `if` of which one side ends in `break` or `return`."""
    branches = (node for node in ast.walk(_tree(file)) if isinstance(node, ast.If))
    ends = (ast.Break, ast.Return)
    return frozenset(
        node.lineno for node in branches if any(isinstance(side[-1], ends) for side in (node.body, node.orelse) if side)
    )


@lru_cache(maxsize=256)
def _handlers(file: str) -> frozenset[int]:
    return frozenset(node.lineno for node in ast.walk(_tree(file)) if isinstance(node, ast.ExceptHandler))


@lru_cache(maxsize=256)
def _yields(file: str) -> frozenset[int]:
    return frozenset(node.lineno for node in ast.walk(_tree(file)) if isinstance(node, ast.Yield))


@lru_cache(maxsize=256)
def literals(file: str) -> tuple[str | float, ...]:
    """Short texts, and numbers, that stand in a file: a value that is one of them is no secret."""
    found: dict[tuple[type, str | float], None] = {}  # 1 and 1.0 are equal, and two values
    constants = (node.value for node in ast.walk(_tree(file)) if isinstance(node, ast.Constant))
    for value in constants:
        if isinstance(value, str | int | float) and len(str(value)) <= _LITERAL:
            found[type(value), value] = None
    return tuple(value for _, value in found)


@lru_cache(maxsize=256)
def named(file: str) -> tuple[tuple[Named, str], ...]:
    """Functions, classes and their objects, and what may be members of enumerations, that a file defines."""
    return tuple(_named(_tree(file), ""))


def _named(node: ast.AST, around: str) -> Iterator[tuple[Named, str]]:
    for inside in ast.iter_child_nodes(node):
        if isinstance(inside, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Named.FUNCTION, around + inside.name
            yield from _named(inside, f"{around}{inside.name}.<locals>.")
        elif isinstance(inside, ast.ClassDef):
            yield Named.CLASS, inside.name
            yield Named.INSTANCE, inside.name
            members = (name for part in inside.body if isinstance(part, ast.Assign) for name in _stored_in(part))
            yield from ((Named.MEMBER, f"{inside.name}.{member}") for member in members)
            yield from _named(inside, f"{around}{inside.name}.")
        else:
            yield from _named(inside, around)


def _stored_in(node: ast.Assign) -> Iterator[str]:
    return (name for target in node.targets for name in _stored(target))


@lru_cache(maxsize=256)
def _loops(file: str) -> tuple[range, ...]:
    loops = [node for node in ast.walk(_tree(file)) if isinstance(node, ast.For | ast.AsyncFor | ast.While)]
    return tuple(range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in loops)


def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):  # the finding stands without its names
        return ast.Module([], [])


@lru_cache(maxsize=256)
def _names(file: str) -> dict[int, tuple[frozenset[str], frozenset[str]]]:
    tree = _tree(file)
    found: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
    everywhere, modules = frozenset({*_imported(tree), "self", "cls"}), frozenset(_modules(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        parts = list(_own_parts(node))
        reads = frozenset(name for part in parts for name in _loaded(part)) - everywhere
        printed = _printed(parts)
        changing = (part for part in parts if part not in printed and not _is_of(modules, part))
        writes = frozenset(name for part in changing for name in _stored(part)) - everywhere
        if isinstance(node, ast.AugAssign):
            reads |= frozenset(_stored(node.target)) - everywhere
        if isinstance(node, ast.For | ast.AsyncFor):  # each pass takes one element, and the last one ends the loop
            passes = {f"{file}:{node.lineno}".replace(".", "/")}  # a dot would make an attribute of it
            reads, writes = reads | passes, writes | passes
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno or node.lineno
        for line in range(node.lineno, max(end, node.lineno) + 1):
            before = found.get(line, (_NOTHING, _NOTHING))
            found[line] = before[0] | reads, before[1] | writes
        if isinstance(node, ast.With | ast.AsyncWith):  # what runs inside runs under this autocast, or lock
            for line in range(end + 1, (node.end_lineno or end) + 1):
                before = found.get(line, (_NOTHING, _NOTHING))
                found[line] = before[0] | reads, before[1]
    return found


def _imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules: calling their functions changes none of them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _is_of(modules: Collection[str], part: ast.AST) -> bool:
    """True for a call of a function of a module, however deep: `os.path.join(...)` does not change `.path`."""
    if not isinstance(part, ast.Call):
        return False
    root: ast.AST = part.func
    while isinstance(root, ast.Attribute):
        root = root.value
    return isinstance(root, ast.Name) and root.id in modules


def _own_parts(node: ast.stmt) -> Iterator[ast.AST]:
    """The parts of a statement without the statements inside."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from ast.walk(child)


_PRINTS = frozenset({"print", "debug", "info", "warning", "error", "log", "write"})


def _printed(parts: Iterable[ast.AST]) -> set[ast.AST]:
    """What is made into text or printed: a method of it that is called there, as `loss.item()`, changes nothing."""
    found: set[ast.AST] = set()
    for part in parts:
        if isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Call) and _called(part) in _PRINTS):
            found.update(inside for child in ast.iter_child_nodes(part) for inside in ast.walk(child))
    return found


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _loaded(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
        yield part.id
    elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
        yield f".{part.attr}"


def _stored(part: ast.AST) -> Iterator[str]:
    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
        yield part.id
    elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
        yield f".{part.attr}"
    elif isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
        yield from _loaded(part.value)
    elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute):
        yield from _loaded(part.func.value)  # `losses.append(loss)` changes `losses`
    elif isinstance(part, ast.Call) and _called(part) == "setattr" and len(part.args) == 3:
        name = part.args[1]
        known = getattr(name, "value", None)  # of a literal
        yield f".{known}" if isinstance(known, str) else ANY_ATTRIBUTE


_RANK = re.compile(r"rank|coordinate", re.IGNORECASE)


def speaks_of_rank(file: str, line: int) -> bool:
    """True for a line that speaks of ranks; the file may be read."""
    return _RANK.search(linecache.getline(file, line)) is not None


_TOKEN = re.compile(r"[\w.]+|[*%()]|//")
_OPERATORS = frozenset({"*", "%", "//"})


def parts_by_rank(file: str, line: int) -> bool:
    """True for a line that computes where the part of a rank begins: `rank * rows`; the file may be read."""
    tokens = _TOKEN.findall(linecache.getline(file, line).replace("()", ""))
    pairs = [*pairwise(tokens), *((right, left) for left, right in pairwise(tokens))]
    return any(operator in _OPERATORS and _RANK.search(name) is not None for operator, name in pairs)
