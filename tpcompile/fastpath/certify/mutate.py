"""Functions of a fast path -> its mutations: one small change each, of the source or of the arguments on the ranks.

A case that gives a mutated kernel the same results as the right one proves little about the right one.
"""

from __future__ import annotations

import ast
import builtins
import copy
import inspect
import itertools
import linecache
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from tpcompile.fastpath.certify.trials import Case
from tpcompile.torch_api.interpreted import forget

_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.Eq: ast.NotEq}
_DROPPED_CALLS = frozenset({"to", "contiguous", "float", "transpose", "flatten"})
_REPLACED_CALLS = {"rsqrt": "sqrt", "sum": "max"}


@dataclass(frozen=True)
class SourceMutation:
    """One function with one change."""

    function: FunctionType
    tree: ast.FunctionDef
    line: int
    """Line of the change in its file."""
    change: str
    """`before -> after`."""

    @property
    def place(self) -> str:
        """`file:line`."""
        return f"{Path(self.function.__code__.co_filename).name}:{self.line}"

    def apply(self, folder: str) -> None:
        """Let this process run the mutated function from here on: for a child process, which then ends.

        Its source is written to `folder`, because Triton reads it.
        """
        file = Path(folder, f"mutated_{os.getpid()}.py")
        file.write_text(ast.unparse(ast.Module([self.tree], [])))
        module = compile(file.read_text(), str(file), "exec", dont_inherit=True)
        codes = [constant for constant in module.co_consts if isinstance(constant, CodeType)]
        self.function.__code__ = next(code for code in codes if code.co_name == self.function.__name__)
        linecache.checkcache(str(file))
        forget(self.function)


@dataclass(frozen=True)
class ArgumentMutation:
    """One argument that the ranks get wrong, as a caller would."""

    name: str
    change: str
    wrong: Callable[[Any], Any] | None = None
    """Value -> wrong value; None to give every rank the slice of the next one."""

    @property
    def place(self) -> str:
        """Which argument."""
        return f"argument {self.name}"

    def spoil(self, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The arguments of every rank with the mistake in them."""
        own = [arguments[self.name] for arguments in ranks]
        wrong = [*own[1:], own[0]] if self.wrong is None else map(self.wrong, own)
        return [{**arguments, self.name: value} for arguments, value in zip(ranks, wrong, strict=True)]


Mutation = SourceMutation | ArgumentMutation


def source_mutations(functions: Iterable[FunctionType], *, of_options: bool = False) -> Iterator[SourceMutation]:
    """All single changes of the functions, in the order of their files and lines.

    With `of_options` each option of each call is left out, too: what a library computes depends on them.
    """
    for function in sorted(functions, key=lambda f: (f.__code__.co_filename, f.__code__.co_firstlineno)):
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
        if not isinstance(tree, ast.FunctionDef) or tree.name != function.__code__.co_name:
            continue  # a lambda, whose lines are those of the statement around it
        tree.decorator_list = []
        changes = ((node, changed) for node in _walked(tree) for changed in _changed(node))
        for place, changed in itertools.chain(changes, _without_options(tree) if of_options else ()):
            # A copy of the function in which `changed` stands for the node `place`.
            memo = {id(place): copy.deepcopy(changed) if changed is not None else ast.Pass()}
            mutated = ast.fix_missing_locations(copy.deepcopy(tree, memo))
            line = first + place.lineno - 1
            text = "nothing"
            if changed is not None:
                text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(changed)))
            yield SourceMutation(function, mutated, line, f"{ast.unparse(place)} -> {text}")


def argument_mutations(case: Case) -> Iterator[ArgumentMutation]:
    """What a caller can get wrong: the slice of the wrong rank, a wrong number, a flag."""
    for name, value in case.arguments.items():
        if name in case.sharded and isinstance(value, Tensor):
            yield ArgumentMutation(name, "the slice of the next rank")
        elif isinstance(value, bool):
            yield ArgumentMutation(name, "the other value", lambda flag: not flag)
        elif isinstance(value, int | float):
            yield ArgumentMutation(name, "twice the value", lambda number: number * 2)
        elif isinstance(value, tuple):
            yield ArgumentMutation(name, "half the numbers", lambda numbers: tuple(n // 2 for n in numbers))


def _without_options(tree: ast.FunctionDef) -> Iterator[tuple[Any, ast.AST]]:
    """(call, the call without one of its keywords); masks are left out anyway."""
    for node in _walked(tree):
        keywords = node.keywords if isinstance(node, ast.Call) else []
        for keyword in keywords:
            rest = [other for other in keywords if other is not keyword]
            if keyword.arg != "mask":
                yield node, ast.Call(node.func, node.args, rest)


def _walked(node: ast.AST) -> Iterator[Any]:
    """All nodes below but messages of errors, and types."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Raise | ast.arguments | ast.AnnAssign):
            yield child
            yield from _walked(child)


def _changed(node: ast.AST) -> Iterator[ast.AST | None]:
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            different = _OPERATORS[type(op)]()
            yield ast.BinOp(left, different, right)
        case ast.Compare(left=left, ops=[op, *_], comparators=right) if type(op) in _COMPARISONS:
            opposite = _COMPARISONS[type(op)]()
            yield ast.Compare(left, [opposite], right)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            pass
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield operand
        case ast.If(test=test, body=body, orelse=[_, *_] as orelse):
            negated = ast.UnaryOp(ast.Not(), test)
            yield ast.If(negated, body, orelse)
        case ast.Expr(value=ast.Call()):
            yield None
        case ast.Call():
            yield from _changed_calls(node)


def _changed_calls(call: ast.Call) -> Iterator[ast.AST]:
    """The call left out or replaced, without its mask, and with two neighbouring arguments that are names swapped."""
    match call.func:
        case ast.Attribute(value=value, attr=name) if name in _DROPPED_CALLS:
            yield value
        case ast.Attribute(value=value, attr=name) if name in _REPLACED_CALLS:
            replaced = ast.Attribute(value, _REPLACED_CALLS[name], ast.Load())
            yield ast.Call(replaced, call.args, call.keywords)
        case ast.Name(id=name) if name not in vars(builtins) and len(call.args) == 1:
            yield call.args[0]
    for index, keyword in enumerate(call.keywords):
        if keyword.arg == "mask":
            without_mask = call.keywords[:index] + call.keywords[index + 1 :]
            yield ast.Call(call.func, call.args, without_mask)
    for index, pair in enumerate(itertools.pairwise(call.args)):
        first, second = pair
        if isinstance(first, ast.Name) and isinstance(second, ast.Name):
            swapped = [*call.args[:index], second, first, *call.args[index + 2 :]]
            yield ast.Call(call.func, swapped, call.keywords)
