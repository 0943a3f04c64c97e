"""Seed -> Drawn: a program, an operator, a rank, a step, a place, and the right verdicts; pure and deterministic.

random.Random(seed) draws program, operator, ranks, rank, step, variant, place and backend, in this order. Faults and
healthy cases have plans of their own: `fault_case(seed)` and `healthy_case(seed)`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from tests.faults.case import Case, Truth
from tests.faults.drawn.operators import ALL, FAULTS, HEALTHY
from tests.faults.drawn.operators.operator import Blame, Operator, Start
from tests.faults.drawn.programs_list import PROGRAMS, Program
from tests.faults.drawn.template import (
    DoesNotFit,
    Edit,
    Insert,
    Source,
    Spot,
    Template,
    mutated,
)

HELD_OUT = 1000
"""Seeds from here on are run once, to measure, never to develop on."""
MAX_RANKS = 4
"""As many as the largest program has; fewer where there are fewer GPUs."""
PROGRAM_FILE = "program.py"
_LIMIT_S = 150.0
_IMPORTS = Insert(
    "file",
    """
    import logging
    import os
    import signal
    import time
    import types

    import torch.distributed._functional_collectives as funcol
    """,
)
_ACTS = Insert("loop", "if job.rank == $rank and step == $step:\n    job.acts()")
_ALL_ACT = Insert("loop", "if step == $step:\n    job.acts()")
_ACTS_AT_START = Insert("start", "if job.rank == $rank:\n    job.acts()")
_ALL_ACT_AT_START = Insert("start", "job.acts()")


@dataclass(frozen=True, kw_only=True)
class Drawn(Case):
    """One program, whose text a seed has drawn."""

    seed: int
    program: Program
    operator: Operator
    rank: int
    backend: str
    source: Source
    truth: Truth
    given: tuple[str, ...] = ()
    """What was not drawn, as options."""

    @property
    def replay(self) -> str:
        """Options of scripts/generated_faults.py that draw it again: one more would draw differently."""
        kind = "healthy" if self.operator.is_healthy else "faults"
        held_out = ["--held-out"] if self.seed >= HELD_OUT else []
        return " ".join([f"--kind {kind} --seeds {self.seed}", *self.given, *held_out])


def fault_case(
    seed: int, *, program: str = "", operator: str = "", without: Iterable[str] = (), max_ranks: int = MAX_RANKS
) -> Drawn:
    """The faulty case of a seed. Program and operator can be given, the rest is drawn."""
    return _case(seed, "fault", program=program, operator=operator, without=without, max_ranks=max_ranks)


def healthy_case(
    seed: int, *, program: str = "", operator: str = "", without: Iterable[str] = (), max_ranks: int = MAX_RANKS
) -> Drawn:
    """The healthy case of a seed."""
    return _case(seed, "healthy", program=program, operator=operator, without=without, max_ranks=max_ranks)


def pairs(kind: str, *, without: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(program, operator) for all operators of a kind, "fault" or "healthy", that fit."""
    left_out = set(without)
    found: list[tuple[str, str]] = []
    for program in PROGRAMS.values():
        if program.name not in left_out:
            found += [(program.name, operator) for operator in _operators_of(program, kind)]
    return found


@cache
def _operators_of(program: Program, kind: str) -> tuple[str, ...]:
    """Names of the operators that fit a program; all pairs take a second."""
    operators = FAULTS if kind == "fault" else HEALTHY
    return tuple(operator.name for operator in operators if fits(program, operator))


def fits(program: Program, operator: Operator) -> bool:
    """True where the operator acts in the program, in one of its forms."""
    if operator.name in program.without or not _backends(program, operator):
        return False
    return bool(_forms(Template.read(program.name), operator))


def is_unseen(case: Drawn, torch_version: str) -> bool:
    """True where this version of torch does not ask the guard that the fault changes."""
    unseen = [name for version, name in case.operator.unseen if torch_version.startswith(f"{version}.")]
    return any(name in ("", case.program.name) for name in unseen)


def _backends(program: Program, operator: Operator) -> list[str]:
    return [name for name in program.backends if not operator.backends or name in operator.backends]


def _case(seed: int, kind: str, *, program: str, operator: str, without: Iterable[str], max_ranks: int) -> Drawn:
    draw = random.Random(f"{kind} {seed}")
    programs_of: dict[str, list[str]] = {}
    for name, found in pairs(kind, without=without):
        if program in ("", name):
            programs_of.setdefault(found, []).append(name)
    # All operators have equal weight, however many programs they fit.
    drawn = operator or draw.choice(sorted(programs_of))
    if drawn not in programs_of:
        raise DoesNotFit(f"{drawn} does not fit {program or 'any program'}")
    chosen = PROGRAMS[draw.choice(programs_of[drawn])]
    given = (f"--program {program}" if program else "", f"--operator {operator}" if operator else "")
    return replace(drawn_case(draw, seed, chosen, ALL[drawn], max_ranks=max_ranks), given=tuple(filter(None, given)))


def drawn_case(draw: random.Random, seed: int, program: Program, operator: Operator, *, max_ranks: int) -> Drawn:
    """A case of this program and operator; the rest is drawn."""
    world_size = draw.choice([size for size in program.world_sizes if size <= max_ranks])
    rank = draw.randrange(world_size)
    step = draw.randrange(2, program.num_steps - 1) if operator.start == Start.STEP else 0
    backend = draw.choice(_backends(program, operator))
    template = Template.read(program.name)
    form = draw.choice(_forms(template, operator))
    spots = _spots(draw, template, form)
    main = spots[0]
    names = {**main.names, "rank": str(rank), "step": str(step)}
    edits: list[tuple[Edit, Spot]] = [(_IMPORTS, template.places("file")[0])]
    edits.append(_acts(template, operator, form))
    edits += zip(form, spots, strict=True)
    source = mutated(template, edits, names)
    truth = _truth(program, operator, source, rank=rank, world_size=world_size)
    kind = "healthy" if operator.is_healthy else "fault"
    return Drawn(
        name=f"{kind}-{seed}-{program.name}-{operator.name}",
        what=operator.what,
        num_steps=program.num_steps,
        options={"policy": "stop", **operator.options},
        limit_s=_LIMIT_S,
        seed=seed,
        program=program,
        operator=operator,
        world_size=world_size,
        rank=rank,
        step=step,
        backend=backend,
        source=source,
        truth=truth,
    )


def _acts(template: Template, operator: Operator, form: Sequence[Edit]) -> tuple[Edit, Spot]:
    """The edit that sets when the fault acts, and its place: before the warm-up if there is one and it acts there."""
    is_of_all = operator.blame == Blame.ALL
    acts_in_warm_up = operator.start == Start.FIRST_CALL and form[0].at != "loop"
    starts = template.places("start")
    if starts and acts_in_warm_up:
        edit = _ALL_ACT_AT_START if is_of_all else _ACTS_AT_START
        return edit, starts[0]
    edit = _ALL_ACT if is_of_all else _ACTS
    return edit, template.places("loop")[0]


def _spots(draw: random.Random, template: Template, form: Sequence[Edit]) -> list[Spot]:
    """Where each edit goes; of several places of a kind that suit the first edit, one is drawn."""
    choices = [_fitting(template, form, edit) for edit in form]
    return [draw.choice(choices[0]), *(spots[0] for spots in choices[1:])]


def _forms(template: Template, operator: Operator) -> list[tuple[Edit, ...]]:
    """Edits and variants of the operator that fit the program."""
    return [form for form in (operator.edits, *operator.variants) if _form_fits(template, form)]


def _form_fits(template: Template, form: Sequence[Edit]) -> bool:
    return all(_fitting(template, form, edit) for edit in form)


def _fitting(template: Template, form: Sequence[Edit], edit: Edit) -> list[Spot]:
    """Spots at which the edit can be made when it is the only one."""
    if isinstance(edit, Insert):
        spots = template.places(edit.at)
    else:
        spots = _sites(template, edit.at)
    return [spot for spot in spots if _goes(template, form, edit, spot)]


def _sites(template: Template, kind: str) -> list[Spot]:
    try:
        return [template.site(kind)]
    except DoesNotFit:
        return []


def _goes(template: Template, form: Sequence[Edit], edit: Edit, spot: Spot) -> bool:
    is_first = edit is form[0]
    names = {"rank": "0", "step": "0"}
    try:
        mutated(template, [(edit, spot)], names if is_first else {**names, "x": "x"})
    except DoesNotFit:
        return False
    return True


def _truth(program: Program, operator: Operator, source: Source, *, rank: int, world_size: int) -> Truth:
    if operator.blame == Blame.ALL:
        # Every group has the fault; which of them is found first is random.
        domains = {program.domain(other, world_size=world_size) for other in range(world_size)}
        ranks = (frozenset[int](), *map(frozenset, sorted(domains)))
    else:
        ranks = _acceptable(operator.blame, rank, program.domain(rank, world_size=world_size))
    lines = source.tagged(operator.tags) if operator.has_line else None
    file = program.layers_in if operator.is_where_layers_are_called else ""
    return Truth(
        causes=operator.causes,
        ranks=ranks,
        source=PROGRAM_FILE,
        lines=lines,
        file=file,
        trace=operator.trace,
        without_log=(rank,) if operator.leaves_no_log else (),
    )


def _acceptable(blame: Blame, rank: int, domain: tuple[int, ...]) -> tuple[frozenset[int], ...]:
    """Sets of ranks that may be blamed; the empty set and the whole domain both mean that the ranks differ."""
    odd, none, all_ranks = frozenset({rank}), frozenset[int](), frozenset(domain)
    if blame == Blame.DIFFER and len(domain) == 2:
        return (odd, all_ranks, none)
    return (odd,)
