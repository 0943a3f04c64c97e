"""Random calls of every collective on real gloo ranks: each is right, or a ConfigError on all ranks alike.

    python scripts/fuzz_collectives.py --cases 100000 --ranks 4 --seed 0 [--out results/fuzz_collectives.json]

All ranks draw the same case from one seed, so each computes the reference from the inputs of all ranks by itself. A
case is forward and, for float inputs, backward; values are small integers, so every sum is exact in every dtype. A
rank that finds a difference, any other exception or no progress for a minute ends the run, exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tpcompile.collectives import api as tp
from tpcompile.errors import ConfigError
from tpcompile.testing import run_on_ranks

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTS = (torch.int64, torch.int32, torch.int8, torch.uint8)
NAMES = ("all_reduce", "copy_to_tp", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter")
MISTAKES = ("dtype", "device", "input", "group", "dim", "type", "op", "indivisible", "sizes", "src")


@dataclass
class Case:
    """One call, equal on all ranks but for the tensors."""

    name: str
    members: tuple[int, ...]
    spelling: str
    dtype: torch.dtype
    shapes: list[tuple[int, ...]]
    layout: str
    dim: int = 0
    dst: str = "I"
    op: str = "sum"
    src: int = 0
    sizes: list[int] | None = None
    matrix: list[list[int]] | None = None
    mistake: str = ""
    xs: list[Tensor] = field(default_factory=list, repr=False)


def draw(rng: random.Random, ranks: int) -> Case:
    """The next case."""
    name = rng.choice(NAMES)
    members = rng.choice([tuple(range(ranks)), tuple(range(ranks)), tuple(range(ranks - ranks // 2, ranks))])
    world = len(members)
    ndim = rng.randrange(0 if name in ("all_reduce", "copy_to_tp", "broadcast") else 1, 4)
    dim = rng.randrange(ndim) if ndim else 0
    shape = [rng.choice((0, 1, 2, 3, 3, 4, 5)) for _ in range(ndim)]
    case = Case(name, members, rng.choice(("group", "name")), rng.choice(FLOATS), [], "contiguous", dim)
    case.dst, case.src = rng.choice("IR"), rng.randrange(world)
    case.op = rng.choice(("sum", "avg", "max", "min", "product")) if name == "all_reduce" else "sum"
    if case.op != "avg" and rng.random() < 0.3:
        case.dtype = rng.choice(INTS if name in ("all_reduce", "reduce_scatter") else (*INTS, torch.bool))
    uneven = rng.random() < 0.4
    case.sizes = [rng.randrange(4) for _ in members] if uneven and name in ("all_gather", "reduce_scatter") else None
    if name == "all_to_all" and uneven:
        case.matrix = [[rng.randrange(3) for _ in members] for _ in members]
    case.shapes = [tuple(_own_shape(case, shape, place, world)) for place in range(world)]
    case.layout = rng.choice(("contiguous", "strided", "expanded", "transposed"))
    if rng.random() < 0.15:
        case.mistake = rng.choice(MISTAKES)
    if rng.random() < 0.5 and ndim:
        case.dim = dim - ndim
    return case


def _own_shape(case: Case, shape: list[int], place: int, world: int) -> list[int]:
    shape = list(shape)
    if case.name == "all_gather" and case.sizes:
        shape[case.dim] = case.sizes[place]
    elif case.name == "reduce_scatter" and case.sizes:
        shape[case.dim] = sum(case.sizes)
    elif case.matrix:
        shape[case.dim] = sum(case.matrix[place])
    elif case.name in ("reduce_scatter", "all_to_all", "scatter"):
        shape[case.dim] *= world
    return shape


def fill(case: Case, generator: torch.Generator) -> tuple[list[Tensor], bool]:
    """Every member's input, and whether a backward follows."""
    low = 0 if case.dtype in (torch.uint8, torch.bool) else -2
    xs = [torch.randint(low, 3 if case.dtype != torch.bool else 2, s, generator=generator) for s in case.shapes]
    if case.name in ("copy_to_tp", "scatter"):
        xs = [xs[0]] * len(xs)
    xs = [_laid_out(x.to(case.dtype), case.layout) for x in xs]
    return xs, case.dtype in FLOATS and case.op != "product" and generator.initial_seed() % 4 != 0


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "strided" and x.dim():
        return torch.stack((x, x), -1)[..., 0]
    if layout == "expanded" and x.dim() and x.shape[0]:
        return x[:1].expand(x.shape)
    return x.t().contiguous().t() if layout == "transposed" and x.dim() == 2 else x


def forward(case: Case, xs: list[Tensor]) -> list[Tensor]:
    """The result of every member, from the inputs of all members."""
    world = len(xs)
    if case.name == "all_reduce":
        return [_reduced(torch.stack(xs), case.op)] * world
    if case.name == "copy_to_tp":
        return xs
    if case.name == "all_gather":
        return [torch.cat(xs, case.dim)] * world
    if case.name == "broadcast":
        return [xs[case.src]] * world
    if case.name == "all_to_all":
        sends = [_parts(x, row, case.dim, world) for x, row in zip(xs, case.matrix or [None] * world, strict=True)]
        return [torch.cat([sends[a][b] for a in range(world)], case.dim) for b in range(world)]
    x = _reduced(torch.stack(xs), "sum") if case.name == "reduce_scatter" else xs[0]
    return _parts(x, case.sizes, case.dim, world)


def backward(case: Case, xs: list[Tensor], cs: list[Tensor]) -> list[Tensor]:
    """The gradient of every member, from the cotangents of all members, by the stated gradient."""
    world = len(xs)
    summed = _reduced(torch.stack(cs), "sum") if case.dst == "R" and len({c.shape for c in cs}) == 1 else cs[0]
    if case.name == "all_reduce" and case.op in ("max", "min"):
        held = torch.stack(xs) == _reduced(torch.stack(xs), case.op)
        return list(torch.where(held, summed, torch.zeros_like(summed)) / held.sum(0).to(summed.dtype))
    if case.name == "all_reduce":
        return [summed / world if case.op == "avg" else summed] * world
    if case.name == "copy_to_tp":
        return [_reduced(torch.stack(cs), "sum")] * world
    if case.name == "all_gather":
        return _parts(summed, case.sizes, case.dim, world)
    if case.name == "broadcast":
        return [summed if place == case.src else torch.zeros_like(summed) for place in range(world)]
    if case.name == "all_to_all":
        receives = [[row[b] for row in case.matrix] if case.matrix else None for b in range(world)]
        sends = [_parts(c, sizes, case.dim, world) for c, sizes in zip(cs, receives, strict=True)]
        return [torch.cat([sends[b][a] for b in range(world)], case.dim) for a in range(world)]
    if case.name == "scatter" and case.dst == "R":
        zero = [torch.zeros_like(c) for c in cs]
        return [torch.cat([*zero[:p], cs[p], *zero[p + 1 :]], case.dim) for p in range(world)]
    return [torch.cat(cs, case.dim)] * world


def _reduced(xs: Tensor, op: str) -> Tensor:
    if op in ("sum", "avg"):
        return xs.sum(0, dtype=xs.dtype) if op == "sum" else xs.sum(0) / len(xs)
    return {"max": xs.amax, "min": xs.amin}[op](0) if op != "product" else xs.prod(0, dtype=xs.dtype)


def _parts(x: Tensor, sizes: list[int] | None, dim: int, world: int) -> list[Tensor]:
    return list(x.split(sizes or [x.shape[dim] // world] * world, dim))


def call(case: Case, x: Any, group: Any, place: int) -> Tensor:
    """The wrapper under test."""
    extra: dict[str, Any] = {"group": group}
    if case.name in ("all_gather", "reduce_scatter", "scatter", "all_to_all"):
        extra["dim"] = case.dim
    if case.sizes is not None:
        extra["sizes"] = case.sizes
    if case.matrix:
        extra |= {"input_splits": case.matrix[place], "output_splits": [row[place] for row in case.matrix]}
    if case.name in ("all_reduce", "all_gather", "broadcast"):
        extra["dst"] = case.dst
    if case.name == "scatter":
        extra["src"] = case.dst
    if case.name == "broadcast":
        extra["src"] = case.src
    if case.name == "all_reduce":
        extra["op"] = case.op
    function = getattr(tp, case.name, None) or getattr(tp, f"{case.name}_single")
    return function(x, **extra)


def spoil(case: Case, x: Tensor, group: Any) -> tuple[Any, Any] | None:
    """Input and group with the mistake of the case; None when it is not a mistake for this collective."""
    name, world = case.name, len(case.members)
    with_dim = name in ("all_gather", "reduce_scatter", "all_to_all", "scatter")
    if case.mistake == "dtype":
        bad = torch.bool if name in ("all_reduce", "reduce_scatter") else torch.int16
        return x.to(bad), group
    if case.mistake == "device" and world > 1:
        return x.to("meta"), group
    if case.mistake == "input":
        return [x], group
    if case.mistake == "group":
        return x, ("no such group", dist.GroupMember.NON_GROUP_MEMBER, 3.5)[world % 3]
    if case.mistake == "dim" and with_dim:
        case.dim = x.dim() + 1
    elif case.mistake == "type" and name in ("all_reduce", "all_gather", "broadcast", "scatter"):
        case.dst = "V"
    elif case.mistake == "op" and name == "all_reduce":
        case.op = "mean"
    elif case.mistake == "sizes" and case.sizes is not None:
        case.sizes = [*case.sizes, 1]
    elif case.mistake == "src" and name == "broadcast":
        case.src = world
    elif (
        case.mistake == "indivisible"
        and world > 1
        and name in ("reduce_scatter", "scatter", "all_to_all")
        and not (case.sizes or case.matrix)
    ):
        x = torch.cat((x, x.new_ones([1 if d == case.dim % x.dim() else s for d, s in enumerate(x.shape)])), case.dim)
    else:
        return None
    return x, group


def one_case(case: Case, seed: int, groups: dict[tuple[int, ...], Any], counts: collections.Counter[str]) -> None:
    """Run a case on this rank and compare; raises AssertionError with what differs."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    xs, with_gradient = fill(case, generator)
    group = groups[case.members]
    if rank not in case.members:
        _expect_error(case, xs[0], group, 0, counts, "not in the group")
        return
    place = case.members.index(rank)
    group = group.group_name if case.spelling == "name" else group
    x = xs[place]
    if case.mistake:
        spoiled = spoil(case, x, group)
        if spoiled is not None:
            _expect_error(case, *spoiled, place, counts, case.mistake)
            return
    before = x.clone()
    x = x.requires_grad_() if with_gradient else x
    y = call(case, x, group, place)
    expected = forward(case, [one.detach() for one in xs])
    _same(y.detach(), expected[place], "value")
    assert type(y) is Tensor, f"result is a {type(y)}"
    counts[f"{case.name} value"] += 1
    if with_gradient:
        cs = [torch.randint(-2, 3, e.shape, generator=generator).to(case.dtype) for e in expected]
        is_i = case.dst == "I" and case.name in ("all_reduce", "all_gather", "broadcast")
        cs = [cs[0]] * len(cs) if is_i else cs
        y.backward(cs[place])
        _same(x.grad, backward(case, [one.detach() for one in xs], cs)[place], "gradient")
        counts[f"{case.name} gradient"] += 1
    _same(x.detach(), before, "input afterwards")


def _expect_error(case: Case, x: Any, group: Any, place: int, counts: collections.Counter[str], why: str) -> None:
    try:
        call(case, x, group, place)
    except ConfigError as error:
        assert len(str(error)) > 20, f"unclear error {error}"
        counts[f"refused: {why}"] += 1
        return
    raise AssertionError(f"no error for the mistake {why!r}")


def _same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    loose = found.is_floating_point() and torch.allclose(found.double(), expected.double(), rtol=8e-3, atol=1e-6)
    assert loose or torch.equal(found, expected), f"{what}: {found}, expected {expected}"


def rank_main(cases: int, seed: int, broken: str) -> dict[str, int]:
    """All cases on this rank; returns how many of each kind were right, or raises with the case that failed."""
    ranks = dist.get_world_size()
    halves = tuple(range(ranks - ranks // 2, ranks))
    groups = {tuple(range(ranks)): dist.group.WORLD, halves: dist.new_group(list(halves))}
    if broken:
        _break(broken)
    rng, counts = random.Random(seed), collections.Counter()
    for number in range(cases):
        case = draw(rng, ranks)
        try:
            one_case(case, seed * 1_000_003 + number, groups, counts)
        except Exception as error:  # of any kind: the case that failed is what is wanted
            raise RuntimeError(f"case {number}: {case}") from error
    dist.barrier()
    return dict(counts)


def _break(name: str) -> None:
    """Negative control: a wrapper that is wrong on purpose."""
    right = getattr(tp, name)
    setattr(tp, name, lambda x, **kwargs: right(x, **kwargs) * 1 + (1 if kwargs.get("dst") == "R" else 0))


def fuzz(cases: int, ranks: int, seed: int, *, broken: str = "", timeout_s: float = 3600) -> dict[str, Any]:
    """Start the ranks, wait, and return the counts by kind of every rank, or the first failure."""
    started_s = time.monotonic()
    counts, failures = [], []
    limits = {"timeout_s": timeout_s, "collective_timeout_s": 60}
    try:
        counts = run_on_ranks(rank_main, cases, seed, broken, world_size=ranks, **limits)
    except (RuntimeError, TimeoutError) as error:
        failures = [str(error)]
    return {
        "cases": cases,
        "ranks": ranks,
        "seed": seed,
        "failures": failures,
        "counts_by_rank": counts,
        "seconds": round(time.monotonic() - started_s, 1),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join(["python", *sys.argv]),
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=3600)
    parser.add_argument("--break", dest="broken", default="", help="wrapper to break, as a negative control")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = fuzz(args.cases, args.ranks, args.seed, broken=args.broken, timeout_s=args.timeout_s)
    text = json.dumps(result, indent=1, sort_keys=True)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    sys.exit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
