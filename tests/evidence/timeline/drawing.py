"""A drawn loop program: functions, loops, branches, compiled regions and groups, line by line."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from tests.evidence.timeline.program import (
    Collective,
    Function,
    FunctionCall,
    Holds,
    If,
    Loop,
    Program,
    Region,
    RegionCall,
    Statement,
)

_SIZES = ("4x4", "4x4", "8x4", "16")
_OPS = ("all_reduce", "all_reduce", "all_reduce", "allgather_base", "reduce_scatter_base")


class Drawing:
    """A program that grows line by line."""

    def __init__(self, draw: random.Random, num_ranks: int) -> None:
        self.draw, self.num_ranks = draw, num_ranks
        self.regions: list[Region] = []
        self.functions: list[Function] = []
        self.groups = groups_of(num_ranks)

    def collective(self, group: str = "") -> Collective:
        common = [name for name, members in self.groups.items() if set(members) == set(range(self.num_ranks))]
        group = group or self.draw.choices([common[0], self.draw.choice(common)], [3, 1])[0]
        content = {"sizes": self.draw.choice(_SIZES), "dtype": "Float"}
        return Collective(0, self.draw.choice(_OPS), group, content)

    def region(self) -> Region:
        usual = [self.collective() for _ in range(self.draw.randint(1, 3))]
        other = [*usual, self.collective()] if self.draw.random() < 0.5 else [*usual[:-1], self.collective()]
        self.regions.append(Region(f"f{len(self.regions)}", 0, [usual, other]))
        return self.regions[-1]

    def function(self, depth: int) -> Function:
        body = self.body(depth + 1)
        self.functions.append(Function(f"g{len(self.functions)}", 0, body))
        return self.functions[-1]

    def body(self, depth: int) -> list[Statement]:
        return [self.statement(depth) for _ in range(self.draw.randint(1, 3 if depth else 5))]

    def statement(self, depth: int) -> Statement:
        draw, kind = self.draw, self.draw.random()
        if kind < 0.36 or depth > 2:
            return self.collective()
        if kind < 0.56:
            is_known = self.regions and draw.random() < 0.3
            region = draw.choice(self.regions) if is_known else self.region()
            return RegionCall(0, region)
        if kind < 0.70:
            is_known = self.functions and draw.random() < 0.4
            function = draw.choice(self.functions) if is_known else self.function(depth)
            return FunctionCall(0, function)
        return self.block(kind, depth)

    def block(self, kind: float, depth: int) -> Statement:
        draw = self.draw
        if kind < 0.80:
            return Loop(0, draw.randint(2, 3), self.body(depth + 1))
        if kind < 0.88:
            return If(0, every(draw.randint(2, 4)), self.body(depth + 1))
        if kind < 0.92:
            return If(0, warm_up(draw.randint(1, 2)), self.body(depth + 1))
        return self.of_some_ranks()

    def of_some_ranks(self) -> Statement:
        """A branch that is healthy: rank 0 calls compiled code for itself, or a subgroup has a collective."""
        some = [name for name, members in self.groups.items() if len(members) < self.num_ranks and name == "first"]
        if some and self.draw.random() < 0.6:
            return If(0, is_one_of(self.groups["first"]), [self.collective("first")], is_of_some_ranks=True)
        local = Region(f"local{self.draw.randrange(1000)}", 0, [[], []])
        return If(0, is_one_of((0,)), [RegionCall(0, local)], is_of_some_ranks=True)


def groups_of(num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Role -> ranks, of rank 0; those of other ranks are like these."""
    everyone = tuple(range(num_ranks))
    groups = {"world": everyone, "second": everyone}
    return groups | {"first": (0, 1)} if num_ranks > 2 else groups


def every(num: int) -> Holds:
    return lambda run: run.step % num == 0


def warm_up(num: int) -> Holds:
    return lambda run: run.step < num


def is_one_of(ranks: Sequence[int]) -> Holds:
    return lambda run: run.rank in ranks


def is_faulty(step: int, *, persists: bool) -> Holds:
    return lambda run: run.is_odd and (run.step == step or (persists and run.step > step))


def drawn_program(draw: random.Random, num_ranks: int) -> tuple[Drawing, Program]:
    """A program of a few steps, with what follows them."""
    drawing = Drawing(draw, num_ranks)
    body = drawing.body(0)
    epilogue: list[Statement] = [drawing.collective() for _ in range(draw.randint(0, 2))]
    return drawing, Program(5, draw.randint(4, 12), body, epilogue)


def blocks(drawing: Drawing, program: Program) -> list[tuple[str, list[Statement]]]:
    """Every list of statements that all ranks run, with the name of its function."""
    found = [("main", program.body), *((one.name, one.body) for one in drawing.functions)]
    for name, body in found:  # it grows: blocks may be nested
        loops = [one for one in body if isinstance(one, Loop)]
        branches = [one for one in body if isinstance(one, If) and not one.is_of_some_ranks]
        found += [(name, one.body) for one in (*loops, *branches)]
    return found


def number_lines(drawing: Drawing, program: Program) -> None:
    """Give every statement its line, in the order of the source: regions and functions, and then the main function."""
    lines = itertools.count(10)
    for region in drawing.regions:
        region.line = next(lines)
        for one in {id(one): one for variant in region.variants for one in variant}.values():
            one.line = next(lines)
    for function in drawing.functions:
        function.line = next(lines)
        _number(function.body, lines, set())
    program.line = next(lines)
    _number(program.body, lines, set())
    _number(program.epilogue, lines, set())


def _number(body: Sequence[Statement], lines: Iterator[int], done: set[int]) -> None:
    for one in body:
        if id(one) in done:
            continue  # it is in both branches: the order of calls is data
        done.add(id(one))
        one.line = next(lines)
        if isinstance(one, Loop | If):
            _number(one.body, lines, done)
        if isinstance(one, If) and one.otherwise:
            next(lines)
            _number(one.otherwise, lines, done)
