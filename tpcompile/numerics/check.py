"""Module builder, inputs and a group -> `NumericsReport`: every program in every dtype against one device."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tpcompile.collectives import api as collectives
from tpcompile.collectives.strategies import Collectives, InPlaceCollectives, TpComm
from tpcompile.errors import ConfigError
from tpcompile.evidence.records import Collective, WrongOp
from tpcompile.layout import Layout
from tpcompile.numerics.agree import check_equal_on_ranks, texts_of_all_ranks
from tpcompile.numerics.counting import (
    Declaration,
    EagerCollectives,
    collective_text,
    compiled_collectives,
    declared_by,
    first_difference,
    roles_of,
)
from tpcompile.numerics.draw import Values
from tpcompile.numerics.error_ratio import cast
from tpcompile.numerics.localise import first_wrong, module_outputs
from tpcompile.numerics.numerics_report import NumericsReport, ProgramReport, TensorError
from tpcompile.numerics.single_device import Build, Inputs, Reference, Result
from tpcompile.numerics.wrong_op import Run, wrong_op_of
from tpcompile.ranks.groups import GroupLike, resolve_group
from tpcompile.recording import CaptureSession

DEFAULT_LIMIT = 2.5
"""Largest error that passes, as a multiple of the single-device error; docs/tp-maths.md lists the worst measured."""
_DRAW_ALIKE = (
    "Every rank gives the full tensors, drawn alike: leave seed and rank out of `inputs` (torch's generators are "
    "seeded for it), or seed your own generator with the same number on all ranks; say what is sharded by sharded={...}"
)
_GIVE_ALIKE = "Every rank passes the same full tensors as `weights`, e.g. from one file"
DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Demands:
    """What a run has to satisfy."""

    limit: float = DEFAULT_LIMIT
    """Largest error, as a multiple of the single-device error in the same dtype."""
    exact: tuple[str, ...] = ()
    """Patterns of tensors that have to be the single-device ones bit for bit."""
    declared: Declaration | None = None
    """Collectives it has to issue; None asks nothing."""


def check_numerics(
    build: Build,
    *,
    inputs: Inputs,
    group: GroupLike,
    dtypes: Sequence[str] = ("float32",),
    programs: Sequence[str] = ("eager", "aot_eager"),
    strategies: Sequence[type[Collectives]] = (Collectives,),
    backward: bool | None = None,
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
    dynamic: bool | None = None,
    name: str = "",
) -> NumericsReport:
    """Compare a tensor-parallel module with itself on one device, in float64; all ranks of the group call it alike.

    build: gets the collectives of the rank and returns the module, its parameters declared by `shard_specs()`.
    inputs: gets the dtype and returns the positional arguments as a tuple or NamedTuple, equal on all ranks. They are
        named `input`, then `input.FIELD` or `input.INDEX`; outputs `forward`, then likewise.
    group: whose ranks hold the shards.
    dtypes: names of the dtypes in which the module is compared.
    programs: `eager` and backends of torch.compile; each compile begins with torch.compiler.reset().
    strategies: ways to issue collectives: mode C, and the modes A and B of `tpcompile.collectives.strategies`, which
        state no gradient and declare no collectives, so that `backward=None` compares their forward only.
    backward: compare gradients too; None does where the strategy states them.
    exact: names or patterns of tensors that must equal the single-device ones bit for bit: those no cross-rank sum
        makes, or all (`*`) with values="integers".
    declared: a `Declared`, the collectives themselves, or a function of the module and the dtype that returns either;
        what eager code sends and what the compiled graphs hold must equal it, in order.
    limit: largest error, as a multiple of the single-device error in the same dtype.
    values: of the weights that are drawn: "skewed" by head, "iid", or "integers", whose sums are exact.
    seed: of torch's generators while inputs and weights are drawn.
    weights: full tensors to load instead of drawing them.
    differentiate: names of the inputs that get a gradient, by default all floating ones.
    sharded: inputs and outputs of which a rank holds a part, by name: a dim for equal parts, or a ShardSpec.
    layouts: layouts of a module without `shard_specs()`, by pattern: `{"*.up.weight": 0}`, a dim or a ShardSpec; what
        no pattern fits is replicated.
    device: where the module runs.
    dynamic: of torch.compile.
    name: what the report calls the module.

    The report is the same on all ranks and holds all of them. Raises ConfigError for an unknown dtype or name, a shape
    the reference does not have, and inputs or weights that differ between ranks.
    """
    if unknown := sorted(set(dtypes) - set(DTYPES)):
        raise ConfigError(f"dtypes={unknown} are unknown; choose from {', '.join(DTYPES)}")
    found, group = [], resolve_group(group)
    demands = Demands(limit, tuple(exact), declared)

    def agree(given: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> None:
        check_equal_on_ranks("inputs", given, group, torch.device(device), todo=_DRAW_ALIKE)
        check_equal_on_ranks("weights", full, group, torch.device(device), todo=_GIVE_ALIKE)

    for dtype in dtypes:
        reference = Reference(
            build,
            inputs,
            dtype=getattr(torch, dtype),
            device=device,
            seed=seed,
            weights=weights,
            values=values,
            train=backward is not False,
            differentiate=differentiate,
            sharded=sharded,
            layouts=layouts,
            agree=agree,
        )
        for strategy in strategies:
            train = not issubclass(strategy, InPlaceCollectives) if backward is None else backward
            for program in programs:
                found.append(check_program(reference, strategy(group), program, demands, train=train, dynamic=dynamic))
    own_text = json.dumps([report.model_dump(mode="json") for report in found])
    of_all_ranks: list[ProgramReport] = []
    for text in texts_of_all_ranks(own_text, group, torch.device(device)):
        of_all_ranks += [ProgramReport.model_validate(report) for report in json.loads(text)]
    return NumericsReport(
        name=name or type(reference.single_device(reference.dtype)).__name__,
        tp=1 if group is None else group.size(),
        torch=torch.__version__,
        seed=seed,
        values=values,
        limit=limit,
        programs=tuple(of_all_ranks),
    )


def check_program(
    reference: Reference,
    comm: TpComm,
    program: str,
    demands: Demands | None = None,
    *,
    train: bool = True,
    dynamic: bool | None = None,
) -> ProgramReport:
    """One program of this rank; the reference may serve many programs. All ranks of the group call it alike."""
    demands = demands or Demands()
    module = reference.place(comm)
    if program == "eager":
        eager = EagerCollectives(comm)
        with eager.listening():
            result = reference.run(module, module, comm, train=train, on_backward=eager.on_backward)
        seen, graphs, breaks = eager.collectives, 0, 0
    else:
        with CaptureSession(groups=roles_of(comm)) as session:
            session.reset_compiler()  # or this module's code would count as a recompile of the one before
            with session.phase("first"):
                compiled = torch.compile(module, backend=program, dynamic=dynamic)
                result = reference.run(compiled, module, comm, train=train)
        seen = compiled_collectives(session)
        graphs = sum(counters.graphs for counters in session.counters(session.compiles()))
        breaks = sum(counters.breaks for counters in session.counters(session.compiles()))
    tensors = tensor_errors(reference, module, comm, result, demands, train=train)
    if any(not tensor.ratio <= demands.limit for tensor in tensors):  # NaN too
        reference.widen()
        tensors = tensor_errors(reference, module, comm, result, demands, train=train)
    wrong = [tensor.name for tensor in tensors if program == "eager" and not tensor.ratio <= demands.limit]  # NaN too
    first_module, first_op = _first_wrong(reference, module, comm, wrong, demands.limit, train=train)
    return ProgramReport(
        rank=comm.rank, strategy=type(comm).__name__, program=program,
        dtype=str(reference.dtype).removeprefix("torch."),
        tensors=tensors,
        collectives=tuple(collective_text(c) for c in seen),
        wrong_order=wrong_order(reference, module, comm, seen, demands, train=train),
        graphs=graphs, breaks=breaks,
        first_wrong=first_module, first_wrong_op=first_op,
    )  # fmt: skip


def tensor_errors(
    reference: Reference, module: nn.Module, comm: TpComm, result: Result, demands: Demands, *, train: bool
) -> tuple[TensorError, ...]:
    """Every output and gradient of one rank's run. Raises ConfigError when `exact` matches none of them."""
    errors = reference.errors(module, result, comm, only_forward=not train)
    names = list(reference.expected(module, comm)) if demands.exact else []
    all_exact: set[str] = set()
    for pattern in demands.exact:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise ConfigError(f"exact={pattern!r} matches no tensor; there are {sorted(errors)}")
        all_exact.update(matching)
    found = []
    for name, value in errors.items():
        exact = name in all_exact
        differs = exact and reference.differs(module, result, name, comm)
        found.append(TensorError(name=name, **value, exact=exact, differs=differs))
    return tuple(found)


def wrong_order(
    reference: Reference, module: nn.Module, comm: TpComm, seen: Sequence[Collective], demands: Demands, *, train: bool
) -> str:
    """First difference between collectives and declaration; modes A and B declare none."""
    if demands.declared is None or isinstance(comm, InPlaceCollectives):
        return ""
    return first_difference(seen, declared_by(demands.declared, module, reference.dtype, size=comm.size, train=train))


def _first_wrong(
    reference: Reference, module: nn.Module, comm: TpComm, wrong: Sequence[str], limit: float, *, train: bool
) -> tuple[str, WrongOp | None]:
    """The first module whose output is wrong, and the op that the wrong outputs begin with, or else the gradients.

    Empty and None where nothing is wrong. The search communicates, so all ranks make it when one has to.
    """
    outputs = [name for name in wrong if name.startswith("forward")]
    flags = torch.tensor([int(bool(wrong)), int(bool(outputs))], device=reference.device)
    is_wrong, is_forward_wrong = collectives.all_reduce(flags, group=comm.group, op="max").tolist()
    if not is_wrong:
        return "", None
    name = ""
    if is_forward_wrong:
        name, wrong, train = _first_module(reference, module, comm, limit), outputs, False
    references = [Run(run, single) for single, run in reference.runs_alone(train=train)]
    own = Run(lambda: reference.run(module, module, comm, train=train).named, module)
    found = wrong_op_of(own, references, wrong, comm.group, dtype=reference.dtype, device=reference.device)
    return name, found


def _first_module(reference: Reference, module: nn.Module, comm: TpComm, limit: float) -> str:
    single = module_outputs(reference.single_device(reference.dtype), reference.given)
    exact = module_outputs(reference.single_device(torch.float64), cast(reference.given, torch.float64))
    got = module_outputs(module, reference.inputs_for(comm))
    return first_wrong(got, single, exact, rank=comm.rank, size=comm.size, limit=limit)
