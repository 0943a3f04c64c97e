"""Text of an FX graph, as torch's structured trace carries it -> `Graph`.

`print_readable` writes Python, so Python's own parser reads it: nodes in order, arguments as the index of the node
that computes them, annotations as values, `# File:` comments as the user's lines.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Graph, Node, UserLine
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.comments import line_of
from tpcompile.evidence.text.normalise import GroupRoles

S = TypeVar("S", bound=ast.stmt)
Located = ast.stmt | ast.expr | ast.arg
"""A part of the syntax tree that has a line number."""
_OPERATOR = re.compile(r" (\*\*?|//?|[+%-]) ")
_FILE_COMMENT = re.compile(
    r"(?>[^#]*#.*?\bFile: )(?>(?P<file>.+?):(?P<line>\d+) in )(?P<function>\S+), code: (?P<code>.*)$"
)
_NO_STACK = re.compile(r"# No stacktrace found")
_CLASS_NAME = re.compile(r"^([^\S\n]*class )\S+?\(", re.MULTILINE)
_STATEMENT = re.compile(r"^(?P<head>\s*\w+(?:\s*:\s*\"[^\"]*\")?\s*=\s*)(?P<value>.*?)(?:;  [\w =]*= None)?$")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_SYMBOL_VALUE = re.compile(r"^Sym\((\w+)\)$")
_WORD = re.compile(r"\w+")
_COLLECTIVE = re.compile(r"^torch\.ops\.(_c10d_functional(_autograd)?|symm_mem|_dtensor)\.")
_OPERATORS = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "truediv", ast.FloorDiv: "floordiv", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "and_", ast.BitOr: "or_", ast.BitXor: "xor",
    ast.LShift: "lshift", ast.RShift: "rshift", ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert",
    ast.Not: "not_", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    ast.Is: "is_", ast.IsNot: "is_not", ast.In: "contains", ast.NotIn: "not_contains",
}  # fmt: skip


def parse_graph(text: str, *, kind: str, roles: GroupRoles) -> Graph:
    """Parse the text of one graph and of its subgraphs.

    `kind` names the graph in records (`dynamo`, `forward`, `inference`, `backward`). A statement that is not Python
    (a repr that torch did not quote) becomes an `unparsed` node with its edges; where the rest does not parse either,
    every line becomes one. They are compared like any node, without ids.
    """
    source = _CLASS_NAME.sub(r"\1Graph(", text)  # torch prints `class <lambda>(...)` too
    tree = _parse(source)
    if tree is None:
        return Graph(kind=kind, nodes=tuple(_unparsed(source)))
    reader = partial(_Reader, kind=kind, lines=_user_lines(source), roles=roles)
    nodes: list[Node] = []
    for cls in _of_type(tree.body, ast.ClassDef):
        nodes += _nodes(cls, "", reader)
    return Graph(kind=kind, nodes=tuple(nodes))


def _parse(source: str) -> ast.Module | None:
    """Parse, after quoting the statements that are not Python, one by one; None where that does not help."""
    lines = source.split("\n")
    for _ in lines:
        try:
            return ast.parse("\n".join(lines))
        except SyntaxError as error:
            number = error.lineno or 0
        except ValueError:
            return None
        statement = "".join(lines[number - 1 : number])  # empty where the error has no line
        quoted = _quoted(statement)
        if quoted is None:
            return None
        lines[number - 1] = quoted
    return None


def _quoted(line: str) -> str | None:
    """`y: "f32[2]" = f(x, <g at 0x7f>);  x = None` -> the same statement with a call that Python can parse.

    The text becomes a template and the names in it arguments, so that edges and constants are kept.
    """
    match = _STATEMENT.match(line)
    if match is None or match["value"].startswith("unparsed("):
        return None
    names: list[str] = []

    def take(name: re.Match[str]) -> str:
        if keyword.iskeyword(name[0]):
            return name[0]
        names.append(name[0])
        return "{}"

    template = _NAME.sub(take, normalise.generic(match["value"]))
    return f"{match['head']}unparsed({', '.join([repr(template), *names])})"


def _unparsed(source: str) -> Iterator[Node]:
    """One node per line of the text, comments left out."""
    line = None
    for text in normalise.stripped_lines(source):
        if match := _FILE_COMMENT.match(text):
            line = line_of(match)
        elif not text.startswith("#"):
            args = (normalise.generic(text),)
            yield Node(scope="", op="call", target="unparsed", args=args, line=line)


def _user_lines(source: str) -> list[UserLine | None]:
    """The user's line that applies at each line of the text, which count from 1."""
    current: UserLine | None = None
    lines: list[UserLine | None] = [None]
    for text in source.splitlines():
        begins_anew = text.lstrip().startswith(("def ", "class "))
        if match := _FILE_COMMENT.match(text):
            current = line_of(match)
        elif begins_anew or _NO_STACK.search(text):
            current = None
        lines.append(current)
    return lines


def _nodes(cls: ast.ClassDef, scope: str, reader: Callable[[str], _Reader]) -> Iterator[Node]:
    """Nodes of one graph, then those of its subgraphs."""
    for forward in _of_type(cls.body, ast.FunctionDef):
        yield from reader(scope).read(forward)
    for index, inner in enumerate(_of_type(cls.body, ast.ClassDef)):
        yield from _nodes(inner, f"{scope}{index}/", reader)


def _of_type(statements: Iterable[ast.stmt], kind: type[S]) -> list[S]:
    return [statement for statement in statements if isinstance(statement, kind)]


@dataclass(frozen=True)
class _Call:
    target: str
    args: Sequence[ast.expr]
    keywords: Sequence[ast.keyword] = ()


class _Calls(ast.NodeVisitor):
    """Expression -> call; a method of one of `names`, those of nodes, is called on that node."""

    def __init__(self, names: Container[str]) -> None:
        self.names = names

    def visit_Call(self, node: ast.Call) -> _Call:
        match node.func:
            case ast.Attribute(value=ast.Name(id=owner) as own, attr=method) if owner in self.names:
                return _Call(f"method {method}", (own, *node.args), node.keywords)
        return _Call(normalise.generic(_dotted(node.func)), node.args, node.keywords)

    def visit_BinOp(self, node: ast.BinOp) -> _Call:
        return _Call(_OPERATORS[type(node.op)], (node.left, node.right))

    def visit_Compare(self, node: ast.Compare) -> _Call:
        if len(node.ops) > 1:
            return self.generic_visit(node)
        return _Call(_OPERATORS[type(node.ops[0])], (node.left, *node.comparators))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> _Call:
        return _Call(_OPERATORS[type(node.op)], (node.operand,))

    def visit_Subscript(self, node: ast.Subscript) -> _Call:
        return _Call("getitem", (node.value, node.slice))

    def generic_visit(self, node: ast.AST) -> _Call:
        assert isinstance(node, ast.expr), "only expressions are asked about"
        return _Call("value", (node,))


class _Reader(ast.NodeVisitor):
    """Statements of one `forward` -> nodes; holds the names seen so far."""

    def __init__(self, scope: str, *, kind: str, lines: list[UserLine | None], roles: GroupRoles) -> None:
        self.scope, self.kind, self.lines, self.roles = scope, kind, lines, roles
        self.names: dict[str, int] = {}
        self.symbols: dict[str, str] = {}
        self.nodes: list[Node] = []
        self.unused: frozenset[str] = frozenset()

    def read(self, forward: ast.FunctionDef) -> list[Node]:
        self.unused = unused_symbols(forward)
        _, *arguments = forward.args.args  # the first is `self`
        kept = [argument for argument in arguments if argument.arg not in self.unused]
        for position, argument in enumerate(kept):
            # a Dynamo placeholder is named by its source (`L_x_`), part of the program; `primals_3` is a temporary
            name = argument.arg
            source = normalise.generic(name) if name[:2] in ("L_", "G_") else f"input {position}"
            self.add("placeholder", source, argument, annotation=argument.annotation, name=name)
        for statement in forward.body:
            self.visit(statement)
        return self.nodes

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, node.value, node.annotation)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.assign(node.targets[0], node.value, None)

    def visit_Expr(self, node: ast.Expr) -> None:
        self.expression(node.value, None, "")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        call = _Call(f"i{_OPERATORS[type(node.op)]}", (node.target, node.value))
        self.call(call, node)
        if isinstance(node.target, ast.Name):
            self.names[node.target.id] = len(self.nodes) - 1

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        args: tuple[str, ...] = ()
        if isinstance(value, ast.Tuple | ast.List):
            value.elts = [one for one in value.elts if not self.is_of_symbol(one)]
        if value is not None:
            args = (self.text(value),)
        self.add("output", "output", node, args=args, name="output")

    def generic_visit(self, node: ast.AST) -> None:
        """No node: torch prints no other statements."""

    def is_of_symbol(self, value: ast.expr) -> bool:
        """True for an unused symbol that a lowered graph saves for the backward, and for the gradient of one."""
        if isinstance(value, ast.Constant):
            return self.kind == "backward" and value.value is None
        return isinstance(value, ast.Name) and value.id in self.unused

    def assign(self, target: ast.expr, value: ast.expr, annotation: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self.expression(value, annotation, target.id)
        elif not _is_none(value):
            self.call(_Call("setitem", (target, value)), value)

    def expression(self, value: ast.expr, annotation: ast.expr | None, name: str) -> None:
        """A value, and the name that it is assigned to; freeing a temporary, or naming it again, is no node."""
        if isinstance(value, ast.Name):
            self.alias(name, value.id, annotation)
        elif isinstance(value, ast.Attribute):
            self.add("get_attr", self.text(value), value, annotation=annotation, name=name)
        elif not _is_none(value):
            self.call(_Calls(self.names).visit(value), value, annotation=annotation, name=name)

    def alias(self, name: str, other: str, annotation: ast.expr | None) -> None:
        """A second name for a node; torch puts the annotation of `x += y` on the alias that it makes of `x`."""
        index = self.names.get(other)
        if not name or index is None:
            return
        self.names[name] = index
        node = self.nodes[index]
        if not node.value:
            self.nodes[index] = node.changed(value=self.value(annotation))

    def call(self, call: _Call, at: Located, *, annotation: ast.expr | None = None, name: str = "") -> None:
        texts = list(map(self.text, call.args))
        named = sorted((keyword.arg or "**", self.text(keyword.value)) for keyword in call.keywords)
        if _COLLECTIVE.match(call.target):
            texts, named = self.with_role(texts, named)
        self.add("call", call.target, at, args=tuple(texts), kwargs=tuple(named), annotation=annotation, name=name)

    def with_role(self, texts: list[str], named: list[tuple[str, str]]) -> tuple[list[str], list[tuple[str, str]]]:
        """Positional and named arguments of a collective, with the role in place of the group's name."""
        by_name = dict(named)
        if "group_name" in by_name:
            group = by_name["group_name"].strip("'")
            by_name["group_name"] = f"group:{self.roles(group)}"
        elif texts[1:] and texts[-1].startswith(("'", '"')):
            group = ast.literal_eval(texts[-1])
            texts = [*texts[:-1], f"group:{self.roles(group)}"]
        return texts, list(by_name.items())

    def add(
        self,
        op: str,
        target: str,
        at: Located,
        *,
        args: tuple[str, ...] = (),
        kwargs: tuple[tuple[str, str], ...] = (),
        annotation: ast.expr | None = None,
        name: str = "",
    ) -> None:
        if name:
            self.names[name] = len(self.nodes)
        value, line = self.value(annotation), first(self.lines[at.lineno : at.lineno + 1])
        self.nodes.append(
            Node(scope=self.scope, op=op, target=target, args=args, kwargs=kwargs, value=value, name=name, line=line)
        )

    def value(self, annotation: ast.expr | None) -> str:
        # A graph from a cache is printed without quotes: `2 * s0`, not `2*s0`.
        text = _OPERATOR.sub(r"\1", _annotation(annotation))
        return normalise.symbols(normalise.generic(text), self.symbols)

    def text(self, expr: ast.expr) -> str:
        """Canonical text of an argument: references by index, everything else as written."""
        renamed = _Renamer(self.names, self.symbols).visit(expr)
        return normalise.generic(_dotted(renamed)).replace("NODE_", "%")


def unused_symbols(forward: ast.FunctionDef) -> frozenset[str]:
    """Placeholders for a size that nothing in the graph uses: the storage offset of a view.

    Torch adds one where the storage offset of an input changed between calls. A rank that takes its part of a tensor
    at `rank * n` has it; rank 0, whose offset is always 0, does not.
    """
    used = _Used()
    used.visit(forward.args)
    if used.symbols:
        used.visit(forward)
    return frozenset(name for name, symbol in used.symbols.items() if not used.words & {name, symbol})


class _Used(ast.NodeVisitor):
    """Names that a function reads, and words of its annotations; what it only returns is saved for the backward."""

    def __init__(self) -> None:
        self.words: set[str] = set()
        self.symbols: dict[str, str] = {}
        """Argument for a size -> its symbol."""

    def visit_arg(self, node: ast.arg) -> None:
        text = _annotation(node.annotation)
        if match := _SYMBOL_VALUE.match(text):
            self.symbols[node.arg] = match[1]
        else:
            self.words.update(_WORD.findall(text))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.words.update(_WORD.findall(_annotation(node.annotation)))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.words.add(node.id)

    def visit_Return(self, node: ast.Return) -> None:
        """A return uses nothing."""


def _annotation(annotation: ast.expr | None) -> str:
    if annotation is None:
        return ""
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ast.unparse(annotation)


def _dotted(expr: ast.expr) -> str:
    """`ast.unparse`, without its cost for `name` and `name.attribute`."""
    if isinstance(expr, ast.Name):
        return expr.id
    if isinstance(expr, ast.Attribute) and isinstance(expr.value, ast.Name | ast.Attribute):
        return f"{_dotted(expr.value)}.{expr.attr}"
    return ast.unparse(expr)


def _is_none(value: ast.expr) -> bool:
    """`x = None` only frees a temporary."""
    return isinstance(value, ast.Constant) and value.value is None


class _Renamer(ast.NodeTransformer):
    """Names of nodes -> `NODE_index`, names of shape symbols -> their canonical name."""

    def __init__(self, names: dict[str, int], symbols: dict[str, str]) -> None:
        self.names, self.symbols = names, symbols

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.names:
            return ast.Name(id=f"NODE_{self.names[node.id]}")
        return ast.Name(id=normalise.symbols(node.id, self.symbols))
