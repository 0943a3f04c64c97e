"""Module builder and inputs -> `NumericsReport` of all ranks, in one process and one thread: no launcher, no backend.

Rests on torch's local-tensor mode, which is private, and on what it can do: eager code, equal shapes on all ranks, and
collectives issued on the group, as `tpcompile.collectives` issues them. It does not compile; for compiled programs
start ranks (`run_on_ranks`, torchrun) and use `check_numerics`. Threads instead (torch's multi-threaded group) would
need one registry of groups per thread, which our replica groups and torch.compile do not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from tpcompile.collectives.strategies import Collectives
from tpcompile.layout import Layout
from tpcompile.numerics import error_ratio
from tpcompile.numerics.check import DEFAULT_LIMIT, Demands, tensor_errors, wrong_order
from tpcompile.numerics.counting import Declaration, EagerCollectives, collective_text
from tpcompile.numerics.draw import Values
from tpcompile.numerics.numerics_report import NumericsReport, ProgramReport
from tpcompile.numerics.single_device import Build, Inputs, Reference, Result, run_once
from tpcompile.ranks import groups
from tpcompile.torch_api import simulated


def check_numerics_local(
    build: Build,
    *,
    inputs: Inputs,
    tp: int,
    dtypes: Sequence[str] = ("float32",),
    backward: bool = True,
    exact: Collection[str] = (),
    declared: Declaration | None = None,
    limit: float = DEFAULT_LIMIT,
    values: Values = "skewed",
    seed: int = 0,
    weights: Mapping[str, Tensor] | None = None,
    differentiate: Collection[str] | None = None,
    sharded: Mapping[str, Layout] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    device: torch.device | str = "cpu",
    name: str = "",
) -> NumericsReport:
    """`check_numerics` of eager code on `tp` ranks that all live in this process; arguments as for `check_numerics`.

    The module's `forward` runs once, each op of it once per rank. It must read the rank from `comm.rank_index(device)`
    only: as a Python number the rank is 0 here, and a buffer holds rank 0's values. Raises ConfigError when the process
    has a default group already.
    """
    found: list[ProgramReport] = []
    demands = Demands(limit, tuple(exact), declared)
    for dtype in dtypes:
        reference = Reference(
            build, inputs, dtype=getattr(torch, dtype), device=device, seed=seed, weights=weights, values=values,
            train=backward, differentiate=differentiate, sharded=sharded, layouts=layouts,
        )  # fmt: skip
        index = {rank: torch.tensor([rank], device=device) for rank in range(tp)}
        with simulated.local_ranks(tp) as group, groups.first_index(simulated.spread(index)):
            found += _all_ranks(reference, Collectives(group), demands)
    return NumericsReport(
        name=name or type(reference.single_device(reference.dtype)).__name__, tp=tp, torch=torch.__version__, seed=seed,
        values=values, limit=limit, programs=tuple(found),
    )  # fmt: skip


def _all_ranks(reference: Reference, comm: Collectives, demands: Demands) -> list[ProgramReport]:
    module = reference.place(comm)
    slices = _spread(lambda: reference.slices_of(reference.full, module, comm), comm)
    for name, tensor in slices.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor))  # of all ranks; buffers are replicated
    eager = EagerCollectives(comm)
    arguments = _spread(lambda: error_ratio.named_tensors(reference.inputs_for(comm), "input"), comm)
    given = error_ratio.replaced(reference.given, list(arguments.values()))
    cotangents = _spread(lambda: reference.cotangents(comm), comm) if reference.train else None
    with simulated.running(comm.size), eager.listening():
        result = run_once(module, module, given, cotangents, reference.differentiated, on_backward=eager.on_backward)
    common = {
        "strategy": type(comm).__name__,
        "program": "eager",
        "dtype": str(reference.dtype).removeprefix("torch."),
        "collectives": tuple(collective_text(c) for c in eager.collectives),
        "wrong_order": wrong_order(reference, module, comm, eager.collectives, demands, train=reference.train),
    }
    reports = []
    for rank in _each_rank(comm):
        outputs = {name: simulated.of_rank(tensor, rank) for name, tensor in result.outputs.items()}
        own = Result(outputs, {name: simulated.of_rank(tensor, rank) for name, tensor in result.grads.items()})
        tensors = tensor_errors(reference, module, comm, own, demands, train=reference.train)
        reports.append(ProgramReport(rank=rank, tensors=tensors, **common))
    return reports


def _spread(slices: Callable[[], dict[str, Tensor]], comm: Collectives) -> dict[str, Tensor]:
    """Tensors by name, as each rank sees them, in one tensor per name."""
    by_rank = {rank: slices() for rank in _each_rank(comm)}
    return {name: simulated.spread({rank: found[name] for rank, found in by_rank.items()}) for name in by_rank[0]}


def _each_rank(comm: Collectives) -> Iterator[int]:
    """Let `comm` be each rank in turn, and rank 0 again after it."""
    for rank in range(comm.size):
        comm.rank = rank
        yield rank
    comm.rank = 0
