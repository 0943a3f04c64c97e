"""Code objects Dynamo traced -> reads of the rank in them, with their lines.

Dynamo folds `dist.get_rank()` and its kin into the graph without a guard, so nothing else tells of them. The file is
parsed once, and only when the names a code object uses make a read possible.
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
_STDLIB = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
_WORLD = frozenset({"torch.distributed.group.WORLD", "torch.distributed.GroupMember.WORLD"})


@dataclass(frozen=True)
class _Read:
    """One read in a source file."""

    first_line: int
    """First line of the function around it, as its code object has it."""
    read: RankRead


def rank_reads(codes: Iterable[CodeType]) -> tuple[RankRead, ...]:
    """Reads of rank, device index, host, process id and environment in these code objects, each once, by line.

    torch, the standard library and code without source are left out; so is what cannot run under the compiler.
    """
    found: dict[RankRead, None] = {}
    for code in dict.fromkeys(codes):
        if _NAMES.isdisjoint(code.co_names) or _is_foreign(code.co_filename):
            continue
        lines = {line for _, _, line in code.co_lines() if line is not None}
        for item in _reads_of_file(code.co_filename):
            line = item.read.line
            if item.first_line == code.co_firstlineno and line is not None and line.line in lines:
                found[_with_value(item.read)] = None
    return tuple(found)


def _with_value(read: RankRead) -> RankRead:
    """The read with what it gives on this rank now; values of variables with a secret's name are hashed."""
    if read.variable:
        return read.model_copy(update={"value": _environment_value(read.variable)})
    if read.kind == TaintKind.HOSTNAME:
        return read.model_copy(update={"value": platform.node()})
    return read


def _environment_value(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        return "(not set)"
    if _SECRET.search(name) or len(value) > _MAX_VALUE:
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
    return value


@functools.cache
def _is_foreign(file: str) -> bool:
    """True for torch, our own wrappers and the standard library: nobody can fix their program there."""
    path = os.path.realpath(file)
    in_stdlib = path.startswith(_STDLIB) and "site-packages" not in path and "dist-packages" not in path
    return in_stdlib or is_library(UserLine(file=file, line=0))


@functools.lru_cache(maxsize=256)
def _reads_of_file(file: str) -> tuple[_Read, ...]:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # a notebook cell with magics: its functions cannot be looked at
        return ()
    return tuple(_File(file, lines, _imports(tree)).reads(tree))


def _imports(tree: ast.AST) -> dict[str, str]:
    """Name in this file -> what it was imported as, e.g. `dist` -> `torch.distributed`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


@dataclass(frozen=True)
class _Scope:
    """Where in a file the walk is."""

    function: str = ""
    first_line: int = 0
    parameters: frozenset[str] = frozenset()
    is_sure: bool = True
    """Every trace of the function comes here."""


_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class _File:
    """Walks one source file; knows its imports."""

    def __init__(self, file: str, lines: list[str], imports: dict[str, str]) -> None:
        self.file, self.lines, self.imports = file, lines, imports

    def reads(self, tree: ast.Module) -> Iterator[_Read]:
        yield from self.block(tree.body, _Scope())

    def block(self, statements: list[ast.stmt], scope: _Scope) -> Iterator[_Read]:
        """Statements in order; behind a conditional way out nothing is sure any more."""
        for statement in statements:
            yield from self.node(statement, scope)
            if isinstance(statement, ast.If) and self.truth(statement.test, scope) is True and _ends(statement.body):
                return
            if scope.is_sure and _may_leave(statement):
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
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                yield from self.block(value, scope)
            elif isinstance(value, list):
                yield from (r for item in value if isinstance(item, ast.AST) for r in self.node(item, scope))
            elif isinstance(value, ast.AST):
                yield from self.node(value, scope)

    def function(self, node: _Function, scope: _Scope) -> Iterator[_Read]:
        """A function is a scope of its own; its decorators and defaults belong to the one around it."""
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        for outside in (*decorators, *node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            yield from self.node(outside, scope)
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        first = min([node.lineno, *(d.lineno for d in decorators)])
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        inner = _Scope(name, first, frozenset(a.arg for a in given if a is not None))
        yield from self.node(node.body, inner) if isinstance(node, ast.Lambda) else self.block(node.body, inner)

    def branches(self, node: ast.If | ast.IfExp, scope: _Scope) -> Iterator[_Read]:
        truth = self.truth(node.test, scope)
        yield from self.node(node.test, scope)
        for branch, taken in ((node.body, truth is not False), (node.orelse, truth is not True)):
            inner = scope if truth is not None else replace(scope, is_sure=False)
            if taken:
                yield from self.block(branch, inner) if isinstance(branch, list) else self.node(branch, inner)

    def operands(self, node: ast.BoolOp, scope: _Scope) -> Iterator[_Read]:
        """`a and b`: b is read only when a is true, and never when a is known to be false."""
        stops = isinstance(node.op, ast.Or)
        for value in node.values:
            yield from self.node(value, scope)
            truth = self.truth(value, scope)
            if truth is stops:
                return
            scope = scope if truth is not None else replace(scope, is_sure=False)

    def truth(self, test: ast.expr, scope: _Scope) -> bool | None:
        """What a test is worth while Dynamo traces, None when only the program knows."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self.truth(operand, scope)
                return None if inner is None else not inner
            case ast.BoolOp(op=op, values=values):
                truths, stops = [self.truth(value, scope) for value in values], isinstance(op, ast.Or)
                return stops if stops in truths else None if None in truths else not stops
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
            # get_rank(group) is the place in that group
            in_group = kind == TaintKind.RANK and bool(node.args or node.keywords)
            return self.found(node, scope, TaintKind.GROUP_RANK if in_group else kind)
        if name in _ENVIRONMENT_CALLS and node.args and isinstance(node.args[0], ast.Constant):
            return self.found(node, scope, TaintKind.ENVIRONMENT, variable=str(node.args[0].value))
        if not isinstance(func, ast.Attribute) or func.attr not in _METHODS or (func.attr == "rank" and node.args):
            return None
        receiver = ast.unparse(func.value)
        if receiver in ("self", "super()"):
            return None  # the user's own method: it is traced too, and what it reads is found there
        is_world = self.name(func.value, scope) in _WORLD
        return self.found(node, scope, _METHODS[func.attr], receiver="" if is_world else receiver)

    def name(self, node: ast.expr, scope: _Scope) -> str:
        """Whole name of what an expression refers to, by the imports of the file; empty for anything else."""
        if isinstance(node, ast.Attribute):
            base = self.name(node.value, scope)
            return f"{base}.{node.attr}" if base else ""
        if isinstance(node, ast.Name) and node.id not in scope.parameters:
            return self.imports.get(node.id, "")
        return ""

    def found(self, node: ast.expr, scope: _Scope, kind: TaintKind, *, receiver: str = "", variable: str = "") -> _Read:
        code = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        line = UserLine(file=self.file, line=node.lineno, function=scope.function, code=code)
        read = RankRead(
            kind=kind, text=ast.unparse(node), line=line, is_sure=scope.is_sure, receiver=receiver, variable=variable
        )
        return _Read(scope.first_line, read)


def _ends(statements: list[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], ast.Return | ast.Raise)


def _may_leave(statement: ast.stmt) -> bool:
    """True when a condition inside may end the function or the loop around it."""
    leaving = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    return isinstance(statement, ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.With) and any(
        isinstance(node, leaving) for node in ast.walk(statement)
    )
