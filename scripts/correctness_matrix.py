"""Block forms x tp x dtype x program, forward and backward, against one device in float64; a table and JSON.

    torchrun --standalone --nproc-per-node 8 scripts/correctness_matrix.py --size gpu --json results/correctness.json
    torchrun --standalone --nproc-per-node 2 scripts/correctness_matrix.py --sample --json out.json

tp takes each divisor of the world size; the first tp ranks form the group, and the other ranks wait at the store. One
reference per form and dtype is used for all tp. Exit code 1 when a cell is wrong, 2 when no cell was run.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.block_forms import FORMS, SAMPLE, SIZES, form_config, forms_of
from tpcompile.collectives.strategies import Collectives, TpComm
from tpcompile.config import BlockConfig
from tpcompile.errors import ConfigError
from tpcompile.nn.block import TransformerStack
from tpcompile.numerics.check import DEFAULT_LIMIT, Demands, check_program
from tpcompile.numerics.draw import draw_inputs
from tpcompile.numerics.numerics_report import ProgramReport
from tpcompile.numerics.single_device import Reference
from tpcompile.ranks.env import choose_device, process_group, rank_env
from tpcompile.ranks.groups import neighbours
from tpcompile.ranks.store import RankStore

ACTIVATIONS = ("input", "input.modulation_B6D", "input.context")
FAULTS = ("", "partial_gradient")
CELL_TIMEOUT_S = 900.0


class PartialGradient(Collectives):
    """A fault: every all-reduce has an all-reduce as its backward, as plain functional collectives have."""

    def all_reduce(self, x: torch.Tensor, dst: Any = "I") -> torch.Tensor:
        """Sum over the group, wrong gradient for a row-linear output."""
        return super().all_reduce(x, "R")


def main() -> int:
    """Run the matrix on this rank; the exit code is the same on all."""
    options = _options()
    env = rank_env()
    device = choose_device(options.device, env)
    started = time.monotonic()
    with process_group(env, device, timeout_s=CELL_TIMEOUT_S, prefix="matrix"):
        store = RankStore.connect("matrix-cells", rank=env.rank, world_size=env.world_size)
        matrix = Matrix(options, store, device, deadline_s=started + options.limit_s)
        cells = matrix.run()
        if env.rank == 0:
            _write(options, cells, matrix, device, seconds=time.monotonic() - started)
        failed = [cell for cell in cells if not cell["passed"]]
        # No rank leaves while rank 0 still needs the store of its launcher.
        store.wait_for_ranks("end", timeout_s=60)
    return 1 if failed else 0 if cells else 2


class Matrix:
    """The cells this job runs, in an order that is the same on all ranks."""

    def __init__(self, options: argparse.Namespace, store: RankStore, device: torch.device, *, deadline_s: float):
        self.options, self.store, self.device, self.deadline_s = options, store, device, deadline_s
        world = store.world_size
        self.sizes = [n for n in range(1, world + 1) if world % n == 0 and n in (options.tp or range(1, world + 1))]
        self.dtypes = options.dtypes or (["float32"] if options.sample else self._all_dtypes())
        programs = ["eager", "aot_eager" if options.sample else "inductor"]
        self.programs = options.programs or programs
        self.forms = options.forms or list(SAMPLE if options.sample else forms_of(options.size))
        self.left_out: list[str] = []
        self.groups = {n: self._group(n) for n in self.sizes}

    def _group(self, tp: int) -> dist.ProcessGroup:
        """This rank's group of `tp` ranks, with the replica groups that forms make of it.

        Every rank is in as many groups as every other and makes them in the same order: torch names a group that only
        its members make by the number of groups a rank knows, so different numbers of groups would hang.
        """
        world = self.store.world_size
        made = [dist.new_group(list(range(k, k + tp)), group_desc=f"tp{tp}") for k in range(0, world, tp)]
        own = made[self.store.rank // tp]
        configs = [form_config(form, self.options.size) for form in self.forms]
        for count in sorted({config.kv_replicas(tp) for config in configs if _fits(config, tp)} - {1}):
            neighbours(own, count)
        return own

    def _all_dtypes(self) -> list[str]:
        return ["float32", "bfloat16", "float64"]

    def run(self) -> list[dict[str, Any]]:
        """Results of all cells, on all ranks."""
        cells = []
        for form in self.forms:
            for dtype in self.dtypes:
                config = form_config(form, self.options.size).model_copy(update={"dtype": dtype})
                reference: Reference | None = None
                for tp in self.sizes:
                    if not _fits(config, tp):
                        self.left_out.append(f"{form} {dtype} tp {tp}: the form cannot be spread over it")
                        continue
                    for program in self.programs:
                        label = f"{form}/{dtype}/{tp}/{program}"
                        if not self._goes(label):
                            self.left_out.append(f"{label}: no time left")
                            continue
                        reference = reference or self._reference(config)
                        cells.append(self._cell(reference, config, form=form, tp=tp, program=program, label=label))
                        _say(self.store.rank, cells[-1])
        return cells

    def _goes(self, label: str) -> bool:
        """Whether there is time for another cell; rank 0 decides, so that all ranks run the same cells."""
        if self.store.rank == 0:
            self.store.put(f"go/{label}", time.monotonic() < self.deadline_s)
        return bool(self.store.get(f"go/{label}", bool, timeout_s=CELL_TIMEOUT_S))

    def _reference(self, config: BlockConfig) -> Reference:
        def stack(comm: TpComm) -> nn.Module:
            with torch.device("meta"):
                return TransformerStack(config, comm, num_layers=config.num_layers)

        wanted = {"input.modulation_B6D": config.modulation, "input.context": config.cross_attention}
        return Reference(
            stack,
            lambda dtype: draw_inputs(
                config, seed=self.options.seed + 1, device=self.device, dtype=dtype, seq_len=config.seq_len
            ),
            dtype=getattr(torch, config.dtype),
            device=self.device,
            seed=self.options.seed,
            differentiate=[name for name in ACTIVATIONS if wanted.get(name, True)],
        )

    def _cell(
        self, reference: Reference, config: BlockConfig, *, form: str, tp: int, program: str, label: str
    ) -> dict[str, Any]:
        """One cell; ranks that are not in it wait for its result."""
        start = time.monotonic()
        if self.store.rank < tp:
            self.store.put(f"cell/{label}/{self.store.rank}", self._own(reference, config, tp, program))
        keys = {rank: f"cell/{label}/{rank}" for rank in range(tp)}
        found, missing = self.store.gather(keys, dict[str, Any], timeout_s=CELL_TIMEOUT_S)
        seconds = round(time.monotonic() - start, 2)
        cell = {"form": form, "tp": tp, "dtype": config.dtype, "program": program, "seconds": seconds}
        failures = [f"rank {rank}: no result" for rank in missing]
        failures += [f"rank {rank}: {text}" for rank in found for text in found[rank]["failures"]]
        worst = max(found.values(), key=lambda own: _number(own["ratio"]), default={"ratio": "nan", "tensor": ""})
        numbers = {key: worst.get(key) for key in ("ratio", "tensor", "error", "single", "collectives")}
        return cell | numbers | {"passed": not failures, "failures": failures[:8]}

    def _own(self, reference: Reference, config: BlockConfig, tp: int, program: str) -> dict[str, Any]:
        strategy = PartialGradient if self.options.fault else Collectives
        sizes = (config.batch, config.seq_len, config.dtype)
        demands = Demands(
            self.options.limit,
            declared=lambda stack, _: stack.declared_collectives(*sizes, True, context_len=config.context_len),
        )
        try:
            report = check_program(reference, strategy(self.groups[tp]), program, demands)
        except Exception:  # reported to the other ranks
            return {"ratio": "nan", "tensor": "", "failures": [traceback.format_exc(limit=-3)]}
        return _summary(report, self.options.limit)


def _summary(report: ProgramReport, limit: float) -> dict[str, Any]:
    worst = max(report.tensors, key=lambda t: _number(t.ratio)).model_dump(mode="json")
    failures = [f"{what}: {how}" for what, how in report.failures(limit).items()]
    if report.breaks:
        failures.append(f"{report.breaks} graph breaks")
    return {
        "ratio": worst["ratio"], "tensor": worst["name"], "error": worst["error"], "single": worst["single"],
        "collectives": len(report.collectives), "failures": failures,
    }  # fmt: skip


def _number(ratio: Any) -> float:
    value = float(ratio)
    return float("inf") if value != value else value


def _fits(config: BlockConfig, tp: int) -> bool:
    try:
        config.check_tp(tp)
    except ConfigError:
        return False
    return not (config.sequence_parallel and config.seq_len % tp)


def _say(rank: int, cell: dict[str, Any]) -> None:
    if rank == 0:
        verdict = "ok " if cell["passed"] else "BAD"
        place = f"{cell['form']:32} tp {cell['tp']} {cell['dtype']:9} {cell['program']:9}"
        print(f"{verdict} {place} {_number(cell['ratio']):8.3g}  {cell['tensor']}  {cell['seconds']} s", flush=True)
        for text in cell["failures"]:
            print(f"      {text}", flush=True)


def _write(
    options: argparse.Namespace, cells: list[dict[str, Any]], matrix: Matrix, device: torch.device, *, seconds: float
) -> None:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else []
    worst = max((_number(cell["ratio"]) for cell in cells), default=float("nan"))
    record = {
        "schema_version": 1,
        "command": " ".join(["scripts/correctness_matrix.py", *sys.argv[1:]]),
        "machine": {"gpus": gpus, "cpu": platform.processor() or platform.machine(), "device": device.type},
        "versions": {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()},
        "world_size": matrix.store.world_size, "seed": options.seed, "limit": options.limit, "size": options.size,
        "cells": cells, "left_out": matrix.left_out, "seconds": round(seconds, 1),
        "summary": {
            "cells": len(cells), "failed": sum(not cell["passed"] for cell in cells), "left_out": len(matrix.left_out),
            "worst_ratio": str(worst) if worst in (float("inf"),) or worst != worst else worst,
        },
    }  # fmt: skip
    print(json.dumps(record["summary"], sort_keys=True), flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(record, sort_keys=True, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="cpu")
    parser.add_argument("--sample", action="store_true", help="few forms, float32, eager and aot_eager: for CI")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), metavar="FORM")
    parser.add_argument("--tp", nargs="+", type=int, help="default: all divisors of the world size")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--programs", nargs="+", metavar="PROGRAM", help="eager, or backends of torch.compile")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT, help="largest error / single-device error")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="start no cell after this many seconds")
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--fault", choices=FAULTS, default="", help="break the gradient, to watch it go red")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
