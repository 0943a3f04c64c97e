"""Code objects Dynamo traced -> reads of the rank in them, with their lines.

Dynamo folds `dist.get_rank()` and similar calls into the graph without a guard, so no log shows them. A file is parsed
once, and only when a code object uses a name that such a read needs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType

from tpcompile.evidence.records import RankRead, TaintKind, UserLine
from tpcompile.evidence.text.lines import is_library
from tpcompile.fastpath.hashing.trees import imports_of

_FUNCTIONS = {
    "torch.distributed.get_rank": TaintKind.RANK,
    "torch.distributed.distributed_c10d.get_rank": TaintKind.RANK,
    "torch.distributed.get_node_local_rank": TaintKind.LOCAL_RANK,
    "torch.distributed.distributed_c10d.get_node_local_rank": TaintKind.LOCAL_RANK,
    "torch.cuda.current_device": TaintKind.DEVICE_INDEX,
    "torch.accelerator.current_device_index": TaintKind.DEVICE_INDEX,
    "torch.xpu.current_device": TaintKind.DEVICE_INDEX,
    "socket.gethostname": TaintKind.HOSTNAME,
    "socket.getfqdn": TaintKind.HOSTNAME,
    "platform.node": TaintKind.HOSTNAME,
    "os.getpid": TaintKind.PID,
}
_METHODS = {
    "rank": TaintKind.GROUP_RANK,
    "get_local_rank": TaintKind.GROUP_RANK,
    "get_coordinate": TaintKind.GROUP_RANK,
    "get_rank": TaintKind.RANK,
    "get_device": TaintKind.DEVICE_INDEX,
}
"""Methods of process groups, meshes and tensors; a user's class may have one of the same name."""
_ENVIRONMENT_CALLS = frozenset({"os.getenv", "os.environ.get"})
_COMPILING = frozenset({
    "torch.compiler.is_compiling", "torch.compiler.is_dynamo_compiling", "torch._dynamo.is_compiling",
    "torch._dynamo.external_utils.is_compiling",
})  # fmt: skip
_NAMES = frozenset({name.rpartition(".")[2] for name in _FUNCTIONS} | set(_METHODS) | {"getenv", "environ", "index"})
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL", re.IGNORECASE)
_MAX_VALUE = 64
"""Characters of a variable that a record holds; a longer value is hashed, as one with a secret's name is."""
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_WORLD = frozenset({"torch.distributed.group.WORLD", "torch.distributed.GroupMember.WORLD"})


@dataclass(frozen=True)
class _Read:
    """One read in a source file."""

    first_line: int
    """First line of the function around it, `co_firstlineno` of its code object."""
    line: int
    """Line of the read itself."""
    read: RankRead


def rank_reads(codes: Iterable[CodeType]) -> tuple[RankRead, ...]:
    """Reads of rank, device index, host, process id and environment in these code objects, each once, by line.

    Reads in torch, in the standard library, in code without source and in branches that Dynamo never traces are left
    out.
    """
    found: dict[RankRead, None] = {}
    for code in dict.fromkeys(codes):
        has_name = not _NAMES.isdisjoint(code.co_names)
        if not has_name or _is_foreign(code.co_filename):
            continue
        lines = {line for _, _, line in code.co_lines()}
        for item in _reads_of_file(code.co_filename):
            if item.first_line == code.co_firstlineno and item.line in lines:
                found[_with_value(item.read)] = None
    return tuple(found)


def _with_value(read: RankRead) -> RankRead:
    """The read with its value on this rank; values of variables with a secret's name are hashed."""
    if read.variable:
        value = os.environ.get(read.variable, "(not set)")
        if _SECRET.search(read.variable) or len(value) > _MAX_VALUE:
            value = f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
        return read.model_copy(update={"value": value})
    if read.kind == TaintKind.HOSTNAME:
        return read.model_copy(update={"value": platform.node()})
    return read


@functools.cache
def _is_foreign(file: str) -> bool:
    """True for torch, our own wrappers and the standard library: a user cannot fix a read there."""
    path = os.path.realpath(file)
    in_stdlib = path.startswith(_STDLIB) and "site-packages" not in path and "dist-packages" not in path
    return in_stdlib or is_library(UserLine(file=file, line=0))


@functools.lru_cache(maxsize=256)
def _reads_of_file(file: str) -> tuple[_Read, ...]:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a notebook cell with magics cannot be parsed
        return ()
    return tuple(_File(file, lines, _imports(tree)).block(tree.body, _Scope()))


def _imports(tree: ast.AST) -> dict[str, str]:
    """Name in this file -> what it was imported as, e.g. `dist` -> `torch.distributed`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        imported = imports_of(node) if isinstance(node, ast.Import | ast.ImportFrom) else {}
        for name, (module, attribute, level) in imported.items():
            if level == 0:
                names[name] = f"{module}.{attribute}" if attribute else module
    return names


@dataclass(frozen=True)
class _Scope:
    """The function that the walk is in, and whether every trace of it gets here."""

    function: str = ""
    first_line: int = 0
    parameters: frozenset[str] = frozenset()
    is_sure: bool = True
    """False in a branch, in a loop, and after a conditional return."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _File:
    """Walks one source file; knows its imports."""

    def __init__(self, file: str, lines: list[str], imports: dict[str, str]) -> None:
        self.file, self.lines, self.imports = file, lines, imports

    def block(self, statements: list[ast.stmt], scope: _Scope) -> Iterator[_Read]:
        """Statements in order; after a conditional return, raise, break or continue no read is sure."""
        for statement in statements:
            yield from self.node(statement, scope)
            # Dynamo traces no statement after `if torch.compiler.is_compiling(): return ...`
            if (
                isinstance(statement, ast.If)
                and isinstance(statement.body[-1], ast.Return | ast.Raise)
                and self.truth(statement.test, scope)
            ):
                return
            if _may_leave(statement):
                scope = replace(scope, is_sure=False)

    def node(self, node: ast.AST, scope: _Scope) -> Iterator[_Read]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from self.function(node, scope)
            case ast.If() | ast.IfExp():
                yield from self.branches(node, scope)
            case ast.BoolOp():
                yield from self.operands(node, scope)
            case ast.For() | ast.AsyncFor() | ast.While() | ast.Try() | ast.Match() | ast.ListComp() | ast.SetComp() \
                    | ast.DictComp() | ast.GeneratorExp():  # fmt: skip
                yield from self.children(node, replace(scope, is_sure=False))
            case _:
                found = self.read(node, scope)
                if found is not None:
                    yield found
                else:
                    yield from self.children(node, scope)

    def children(self, node: ast.AST, scope: _Scope) -> Iterator[_Read]:
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody"):
                yield from self.part(value, scope)
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):  # others are plain values
                    yield from self.node(item, scope)

    def part(self, part: list[ast.stmt] | ast.AST, scope: _Scope) -> Iterator[_Read]:
        """A body: statements, or the one expression of a lambda or a conditional expression."""
        yield from self.block(part, scope) if isinstance(part, list) else self.node(part, scope)

    def function(self, node: _Function, scope: _Scope) -> Iterator[_Read]:
        """A function has a scope of its own; its decorators and defaults are evaluated in the scope around it."""
        name, decorators = "<lambda>", []
        if not isinstance(node, ast.Lambda):
            name, decorators = node.name, node.decorator_list
        given = node.args
        for outside in (*decorators, *given.defaults, *given.kw_defaults):
            if outside is not None:  # a keyword-only parameter without a default has None
                yield from self.node(outside, scope)
        first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        names = frozenset(parameter.arg for parameter in parameters if parameter is not None)
        yield from self.part(node.body, _Scope(name, first_line, names))

    def branches(self, node: ast.If | ast.IfExp, scope: _Scope) -> Iterator[_Read]:
        truth = self.truth(node.test, scope)
        yield from self.node(node.test, scope)
        inner = replace(scope, is_sure=False) if truth is None else scope
        if truth is not False:
            yield from self.part(node.body, inner)
        if truth is not True:
            yield from self.part(node.orelse, inner)

    def operands(self, node: ast.BoolOp, scope: _Scope) -> Iterator[_Read]:
        """`a and b`: b is read only when a is true, and never when a is known to be false."""
        stops = isinstance(node.op, ast.Or)
        for value in node.values:
            yield from self.node(value, scope)
            truth = self.truth(value, scope)
            if truth is stops:
                return
            if truth is None:
                scope = replace(scope, is_sure=False)

    def truth(self, test: ast.expr, scope: _Scope) -> bool | None:
        """Value of a test while Dynamo traces; None when it is not known before the program runs."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand, scope)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                truths = [self.truth(value, scope) for value in values]
                is_or = isinstance(op, ast.Or)
                if is_or in truths:
                    return is_or
                return None if None in truths else not is_or
            case ast.Call(func=func):
                return True if self.name(func, scope) in _COMPILING else None
        return None

    def read(self, node: ast.AST, scope: _Scope) -> _Read | None:
        match node:
            case ast.Call(func=func):
                return self.call(node, func, scope)
            case ast.Subscript(value=value, slice=ast.Constant(value=str(variable)), ctx=ast.Load()):
                if self.name(value, scope) == "os.environ":
                    return self.found(node, scope, TaintKind.ENVIRONMENT, variable=variable)
            case ast.Attribute(attr="index", value=ast.Attribute(attr="device"), ctx=ast.Load()):
                return self.found(node, scope, TaintKind.DEVICE_INDEX)
            case ast.Attribute(attr="nodename", value=ast.Call(func=func)) if self.name(func, scope) == "os.uname":
                return self.found(node, scope, TaintKind.HOSTNAME)
        return None

    def call(self, node: ast.Call, func: ast.expr, scope: _Scope) -> _Read | None:
        name = self.name(func, scope)
        if name in _FUNCTIONS:
            kind = _FUNCTIONS[name]
            has_group = bool(node.args or node.keywords)
            if has_group and kind == TaintKind.RANK:
                kind = TaintKind.GROUP_RANK
            return self.found(node, scope, kind)
        if name in _ENVIRONMENT_CALLS:
            variable = node.args[0] if node.args else None
            if isinstance(variable, ast.Constant):
                return self.found(node, scope, TaintKind.ENVIRONMENT, variable=str(variable.value))
            return None
        if isinstance(func, ast.Attribute) and func.attr in _METHODS:
            return self.method(node, func, scope)
        return None

    def method(self, node: ast.Call, func: ast.Attribute, scope: _Scope) -> _Read | None:
        if func.attr == "rank" and node.args:
            return None
        receiver = ast.unparse(func.value)
        if receiver in ("self", "super()"):
            return None  # the user's own method is traced too: a read is found in its code
        is_world = self.name(func.value, scope) in _WORLD
        return self.found(node, scope, _METHODS[func.attr], receiver="" if is_world else receiver)

    def name(self, node: ast.expr, scope: _Scope) -> str:
        """Qualified name of an imported object that an expression refers to; empty for anything else."""
        if isinstance(node, ast.Name):
            is_parameter = node.id in scope.parameters
            return "" if is_parameter else self.imports.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        base = self.name(node.value, scope)
        return f"{base}.{node.attr}" if base else ""

    def found(self, node: ast.expr, scope: _Scope, kind: TaintKind, *, receiver: str = "", variable: str = "") -> _Read:
        code = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        line = UserLine(file=self.file, line=node.lineno, function=scope.function, code=code)
        read = RankRead(
            kind=kind, text=ast.unparse(node), line=line, is_sure=scope.is_sure, receiver=receiver, variable=variable
        )
        return _Read(scope.first_line, node.lineno, read)


def _may_leave(statement: ast.stmt) -> bool:
    """True when a condition inside may end the function or the loop around it."""
    leaving = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    return isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.With) and any(
        isinstance(node, leaving) for node in ast.walk(statement)
    )
