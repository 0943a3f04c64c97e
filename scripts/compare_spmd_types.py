"""Our type check and spmd_types on the broken and correct modules of tests/typecheck -> rates as a table and as JSON.

PYTHONPATH=FOLDER_OF_SPMD_TYPES python scripts/compare_spmd_types.py [--label TEXT] [--out FILE]

spmd_types is no dependency: `pip download --no-deps spmd_types==0.3.1`, unpack, put the folder on PYTHONPATH. Each
module runs as it is; `tpcompile.collectives.api` is replaced by the functions of spmd_types for the time of the run,
and parameters, inputs and outputs get the layout that our check gets.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.typecheck import fresh, realistic, third
from tests.typecheck.cases import Case
from tests.typecheck.programs import TP, WIDTH, Program, built
from tpcompile.collectives import api
from tpcompile.collectives.strategies import Collectives
from tpcompile.layout import ShardSpec
from tpcompile.typecheck import check_types, fake_ranks

ROOT = Path(__file__).resolve().parents[1]
SETS = {"realistic": realistic, "fresh": fresh, "third": third}
OURS = "tpcompile"
FORMS = {
    "spmd_types local": {"local": True, "strict_mode": "permissive"},
    "spmd_types local strict": {"local": True, "strict_mode": "strict"},
    "spmd_types global": {"local": False, "strict_mode": "permissive"},
    "spmd_types global strict": {"local": False, "strict_mode": "strict"},
}
"""Local types: R, I, V, P. Global ones: a V also knows its sharded dim, and DTensor's rules follow it through an op."""
REASONS = {
    "a V has no sharded dim, so what crosses a shard, or gathers or mixes dims, is V to V": (
        "gathers_tokens_instead_of_features", "gathers_batch_instead_of_tokens", "rotates_halves_of_sharded_features",
        "functional_gather_of_features_along_tokens", "cumsum_over_sharded_tokens", "scan_of_gates_over_sharded_tokens",
        "token_shift_over_sharded_tokens", "reverses_sharded_tokens", "convolves_sharded_tokens",
        "standardises_sharded_features", "normalises_queries_over_all_heads_locally", "causal_context_parallel",
        "attends_to_its_own_tokens_only", "masks_local_scores", "adds_rows_to_columns",
        "column_linear_on_sharded_tokens", "gated_linear_unit_gathers_the_wrong_axis",
        "ulysses_gathers_heads_as_tokens", "prefix_sum_attention_over_shards", "discounted_product_over_shards",
        "time_mix_with_pad", "channel_shuffle_of_sharded_features", "bidirectional_mixer",
        "sequence_parallel_causal_attention", "lora_of_two_layouts", "expert_on_sharded_tokens",
        "temporal_pooling_of_shards", "weight_norm_of_a_sharded_dim", "batch_norm_of_a_sharded_batch",
    ),
    "a contraction over a sharded dim is V unless the module asserts P, and all_reduce takes any V for a P": (
        "gathers_a_partial_sum", "reduces_a_shard", "adds_hidden_features_of_all_ranks", "averages_masked_means",
        "scores_by_local_maximum",
    ),
    "which reduction makes a value whole (sum, mean, maximum) is no part of a type": (
        "sums_local_means", "sums_local_mean_squares", "averages_a_row_linear", "token_loss_is_averaged_then_added",
        "auxiliary_loss_of_local_means", "rms_norm_sums_means",
    ),
    "without a gradient R and I are the same, and which parameters get one is not asked": (
        "reduces_under_no_grad", "reduces_in_a_helper_without_gradient", "reduces_what_was_detached",
        "inference_style_block", "data_of_a_partial_sum",
    ),
    "whose tokens an all-to-all brought is no part of a type": ("experts_keep_the_tokens",),
    "from where a number counts is no part of a type": ("best_token_of_local_numbers",),
    "what a generator was seeded with is no part of a type": ("drops_whole_features_by_a_seed_per_rank",),
}  # fmt: skip
"""Module -> why neither tool reports it."""


@dataclass(frozen=True)
class Outcome:
    """What a tool reported on one module: an alarm with its line, an error of another kind, or nothing."""

    kind: str
    text: str = ""
    line: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind == "nothing" else f"{self.kind}: {self.text} | {self.line}"


def ours(case: Case) -> Outcome:
    """The first finding of our check, as the tests call it."""
    report = check_types(
        built(case.forward, **case.layouts),
        (torch.ones(2, 8, WIDTH),),
        tp=TP,
        input_types=(case.input_type,),
        output_type=case.output_type,
    )
    found = report.finding
    return Outcome("nothing") if found is None else Outcome("alarm", f"{found.rule} {found.op}", found.site.source)


def theirs(case: Case, **options: Any) -> Outcome:
    """The first SpmdTypeError on rank 0 or on the last one, or what else stopped the run."""
    from spmd_types import SpmdTypeError

    for rank in (0, TP - 1):
        try:
            _run(case, rank, options)
        except SpmdTypeError as error:
            return Outcome("alarm", str(error).strip().splitlines()[0], _line_of(error))
        except Exception as error:  # counted as stopped; the next module still runs
            text = (str(error).strip().splitlines() or [""])[0]
            return Outcome("stopped", f"{type(error).__name__}: {text}", _line_of(error))
    return Outcome("nothing")


def _line_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f.line or "" for f in frames if Path(f.filename).parent == ROOT / "tests" / "typecheck"]
    return own[-1] if own else "the output"


def _run(case: Case, rank: int, options: dict[str, Any]) -> None:
    import spmd_types as spmd
    import spmd_types.checker

    with fake_ranks(TP, rank=rank):
        shares_kv = any(isinstance(layout, ShardSpec) for _, layout in case.layouts.values())
        if shares_kv:  # neighbours hold the same head: two axes, of which the weight is sharded over one
            mesh = init_device_mesh("cpu", (TP // 2, 2), mesh_dim_names=("owners", "replicas"))
            group = mesh._flatten("tp").get_group()
            axes = [mesh.get_group("owners"), mesh.get_group("replicas")]
        else:
            mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
            group = mesh.get_group("tp")
            axes = [group]
        module = Program(case.forward, Collectives(group), case.layouts)
        x = torch.ones(2, 8, WIDTH, requires_grad=True)
        with (
            spmd.set_current_mesh(mesh),
            spmd_types.checker.typecheck(**options),
            _adapted(group, axes),
        ):
            for name, parameter in module.named_parameters():
                layout = case.layouts[name][1]
                over = axes[:1] if isinstance(layout, ShardSpec) else axes
                dim = layout.dim if isinstance(layout, ShardSpec) else layout
                _declare(parameter, dim, axes, over)
            _declare(x, None if case.input_type == "I" else int(case.input_type[2]), axes, axes)
            output = module(x)
            for leaf in output if isinstance(output, tuple) else (output,):
                _judge_output(leaf, case.output_type, axes)


def _declare(tensor: Tensor, dim: int | None, axes: list[Any], over: list[Any]) -> None:
    """I on all axes, or sharded along `dim` on those in `over`."""
    import spmd_types as spmd

    if dim is None:
        spmd.assert_type(tensor, dict.fromkeys(axes, spmd.I))
    elif len(over) == 1:
        spmd.assert_type(tensor, {axis: spmd.S(dim) if axis in over else spmd.I for axis in axes})
    else:
        spec = [tuple(over) if at == dim else None for at in range(tensor.dim())]
        spmd.assert_type(tensor, dict.fromkeys(axes, spmd.V), partition_spec=spmd.PartitionSpec(*spec))


def _judge_output(leaf: Tensor, wanted: str | None, axes: list[Any]) -> None:
    """I where the caller expects it, R too where there is no gradient; nothing partial anywhere."""
    import spmd_types as spmd

    found = spmd.get_local_type(leaf)
    for axis in axes:
        kind = found.get(_normal(axis))
        is_right = kind is not spmd.P if wanted != "I" else kind in (spmd.I, None)
        if not is_right and not (kind is spmd.R and not leaf.requires_grad):
            raise spmd.SpmdTypeError(f"output: {kind} where {wanted} is declared")


def _normal(axis: Any) -> Any:
    import spmd_types as spmd

    return spmd.normalize_axis(axis)


@contextmanager
def _adapted(group: Any, axes: list[Any]) -> Iterator[None]:
    """Our wrappers and the functional collectives stand for the functions of spmd_types with the same meaning."""
    import spmd_types as spmd

    to = {"I": spmd.I, "R": spmd.R}

    def axis_of(found: Any) -> Any:
        return group if found is group else axes[-1]

    def all_reduce(x: Tensor, *, group: Any, dst: str = "I", op: str = "sum") -> Tensor:
        axis = axis_of(group)
        if op in ("max", "min"):  # has no counterpart: a V becomes R, without a gradient
            if spmd.P in spmd.get_local_type(x).values():
                raise spmd.SpmdTypeError(f"all_reduce({op}) of a partial sum")
            with spmd.no_typecheck():
                result = x.detach().clone()
            spmd.assert_type(result, dict.fromkeys(axes, spmd.R))
            return result
        summed = spmd.all_reduce(x, axis, src=spmd.P, dst=to[dst])
        return summed / axis.size() if op == "avg" else summed

    def all_gather_single(x: Tensor, *, dim: int, group: Any, dst: str = "R") -> Tensor:
        return spmd.all_gather(x, axis_of(group), src=spmd.S(dim % x.dim()), dst=to[dst])

    def reduce_scatter_single(x: Tensor, *, dim: int, group: Any) -> Tensor:
        return spmd.reduce_scatter(x, axis_of(group), src=spmd.P, dst=spmd.S(dim % x.dim()))

    def all_to_all_single(x: Tensor, *, group: Any, dim: int = 0) -> Tensor:
        parts = x.unflatten(dim, (axis_of(group).size(), -1))
        sent = spmd.all_to_all(parts, axis_of(group), src=spmd.V, dst=spmd.V, split_dim=dim, concat_dim=dim)
        return sent.flatten(dim, dim + 1)

    def scatter_single(x: Tensor, *, dim: int, group: Any, src: str = "I") -> Tensor:
        return spmd.convert(x, axis_of(group), src=to[src], dst=spmd.S(dim % x.dim()))

    def copy_to_tp(x: Tensor, *, group: Any) -> Tensor:
        return spmd.convert(x, axis_of(group), src=spmd.I, dst=spmd.R)

    def rank_index(group: Any, device: torch.device) -> Tensor:
        with spmd.no_typecheck():
            index = torch.tensor([group.rank()], device=device)
        # A rank's own number is a shard of (0, 1, ..., ranks - 1): the only V that global types have.
        _declare(index, 0, axes, axes)
        return index

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (api, f.__name__, f)
        for f in (
            all_reduce,
            all_gather_single,
            reduce_scatter_single,
            all_to_all_single,
            scatter_single,
            copy_to_tp,
            rank_index,
        )
    ]
    own_reduce, own_gather = funcol.all_reduce, funcol.all_gather_tensor

    def functional_reduce(x: Tensor, reduceOp: str, group: Any, **options: Any) -> Tensor:
        if _is_called_by_spmd_types():
            return own_reduce(x, reduceOp, group, **options)
        return all_reduce(x, group=group, dst="R", op=reduceOp)  # its gradient is summed over the ranks

    def functional_gather(x: Tensor, gather_dim: int, group: Any, **options: Any) -> Tensor:
        if _is_called_by_spmd_types():
            return own_gather(x, gather_dim, group, **options)
        return all_gather_single(x, dim=gather_dim, group=group)

    replaced += [(funcol, "all_reduce", functional_reduce), (funcol, "all_gather_tensor", functional_gather)]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, function in replaced:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _is_called_by_spmd_types() -> bool:
    return sys._getframe(2).f_globals["__name__"].startswith("spmd_types")


def compared(check: Callable[[Case], Outcome]) -> dict[str, dict[str, Any]]:
    """Set of modules -> rates, and the outcome of each case.

    A broken module counts as found when the alarm is about it: not when its correct twin has the same alarm.
    """
    results: dict[str, dict[str, Any]] = {}
    for name, cases in SETS.items():
        on_correct = {case.forward.__name__: check(case) for case in cases.CORRECT}
        on_broken = {case.forward.__name__: check(case) for case in cases.BROKEN}
        twins = {case.forward.__name__: case.twin.__name__ for case in cases.BROKEN if case.twin is not None}
        also = {
            broken
            for broken, outcome in on_broken.items()
            if outcome.kind == "alarm" and broken in twins and on_correct[twins[broken]].text == outcome.text
        }
        kinds = [outcome.kind for outcome in on_broken.values()]
        results[name] = {
            "broken": len(on_broken),
            "found": kinds.count("alarm") - len(also),
            "same alarm as its correct twin": len(also),
            "broken, stopped": kinds.count("stopped"),
            "correct": len(on_correct),
            "false alarms": sum(outcome.kind == "alarm" for outcome in on_correct.values()),
            "correct, stopped": sum(outcome.kind == "stopped" for outcome in on_correct.values()),
            "on broken": {name: _text_of(name, outcome, name in also) for name, outcome in on_broken.items()},
            "on correct": {k: str(v) for k, v in on_correct.items()},
        }
    return results


def _text_of(name: str, outcome: Outcome, is_same_as_twin: bool) -> str:
    if outcome.kind != "nothing":
        return f"{outcome} (its correct twin too)" if is_same_as_twin else str(outcome)
    return f"nothing: {next((reason for reason, names in REASONS.items() if name in names), 'no reason noted')}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--label", default="now", help="name of this run in the file")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if util.find_spec("spmd_types") is None:
        print(
            "skipped: spmd_types is not importable; `pip download --no-deps spmd_types==0.3.1`, unpack, set PYTHONPATH"
        )
        return 0
    warnings.filterwarnings("ignore")
    logging.disable()  # DTensor logs the traceback of every op for which it has no rule
    checks: dict[str, Callable[[Case], Outcome]] = {OURS: ours}
    for form, options in FORMS.items():
        checks[form] = lambda case, options=options: theirs(case, **options)
    rows = {name: compared(check) for name, check in checks.items()}
    print(f"{'':26}" + "".join(f"{name:>22}" for name in SETS))
    for name, sets in rows.items():
        cells = (f"{r['found']}/{r['broken']} found, {r['false alarms']}/{r['correct']} false" for r in sets.values())
        print(f"{name:26}" + "".join(f"{cell:>22}" for cell in cells))
    if args.out is not None:
        _write(args.out, args.label, rows)
    return 0


def _write(out: Path, label: str, rows: dict[str, Any]) -> None:
    """Add the run to the file, beside the runs with other labels."""
    runs = json.loads(out.read_text())["runs"] if out.exists() else {}
    runs[label] = {"command": " ".join(["python", "scripts/compare_spmd_types.py", *sys.argv[1:]]), "rates": rows}
    head = {
        "torch": torch.__version__,
        "spmd_types": metadata.version("spmd_types"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "tp": TP,
    }
    out.write_text(json.dumps(head | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
