"""Arguments -> a sweep, its tables and its results; the body of scripts/generated_faults.py."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tests.faults.drawn.names import Route
from tests.faults.drawn.operators import FAULTS, HEALTHY
from tests.faults.drawn.plan import HELD_OUT, MAX_RANKS, Case, fault_case, healthy_case, is_unseen, pairs
from tests.faults.drawn.programs_list import PROGRAMS
from tpcompile.private_folder import cache_folder

_PRELOADED = (
    "setuptools",
    "sympy.combinatorics",
    "sympy.physics",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "tests.faults.drawn.frame",
    "tests.block_forms",
)
_TRANSFORMERS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3.modeling_qwen3",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when all is as it should be."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.list:
        _list()
        return 0
    if max(args.seeds) >= HELD_OUT and not args.held_out:
        parser.error(f"seeds from {HELD_OUT} on are held out: they are for measuring only (--held-out)")
    return _sweep(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="generated faults of rank divergence")
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0-19"), help="N or FIRST-LAST")
    parser.add_argument("--kind", choices=["faults", "healthy", "both"], default="faults")
    parser.add_argument("--routes", type=_routes, default=tuple(Route), help="separated by commas; default: all")
    parser.add_argument("--program", default="", help="draw only from this program")
    parser.add_argument("--operator", default="", help="draw only from this operator")
    parser.add_argument("--each", action="store_true", help="every operator once, for the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="cases to run in parallel")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--keep", type=Path, help="keep programs, logs and verdicts below this folder")
    parser.add_argument("--held-out", action="store_true", help="allow seeds from 1000 on")
    parser.add_argument("--nccl", action="store_true", help="on GPUs, one for each rank")
    parser.add_argument("--list", action="store_true", help="programs and operators")
    return parser


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def _routes(text: str) -> tuple[Route, ...]:
    return tuple(Route(name) for name in text.split(","))


def _list() -> None:
    print(f"{len(PROGRAMS)} programs: {', '.join(PROGRAMS)}")
    print(f"{len(FAULTS)} faults, {len(pairs('fault'))} pairs with a program:")
    for operator in FAULTS:
        print(f"  {operator.name:26} {operator.what}")
    print(f"{len(HEALTHY)} healthy:")
    for operator in HEALTHY:
        print(f"  {operator.name:26} {operator.what}")


def _sweep(args: argparse.Namespace) -> int:
    # Imported here: they import torch, and --help and --list do not need it.
    from tests.faults.drawn.forked import preload
    from tests.faults.drawn.sweep import Row, Settings, sweep
    from tests.faults.drawn.table import line_of, results, tables
    from tpcompile.torch_api.forked import MODULES

    without = _missing()
    max_ranks = _num_gpus() if args.nccl else MAX_RANKS
    without += [program.name for program in PROGRAMS.values() if min(program.world_sizes) > max_ranks]

    cases = _cases(args, without, max_ranks)
    is_transformers_needed = any(case.program.needs for case in cases)
    preload([*MODULES, *_PRELOADED, *(_TRANSFORMERS if is_transformers_needed else ())])
    command = shlex.join(["scripts/generated_faults.py", *sys.argv[1:]])
    seen: list[Row] = []

    def report(row: Row) -> None:
        """Print the row and write what there is: a sweep that is stopped has results."""
        print(line_of(row), flush=True)
        seen.append(row)
        if args.json:
            args.json.write_text(json.dumps(results(seen, command=command), indent=1, sort_keys=True) + "\n")

    # Not a TemporaryDirectory: every forked rank would remove it at its end.
    directory = args.keep or Path(tempfile.mkdtemp(prefix="generated-"))
    settings = Settings(
        routes=args.routes,
        directory=directory.absolute(),
        caches=cache_folder("generated-cpp"),
        jobs=args.jobs,
        keep=args.keep is not None,
        is_nccl=args.nccl,
    )
    try:
        rows = sweep(cases, settings, report=report)
    finally:
        if not args.keep:
            shutil.rmtree(directory, ignore_errors=True)
    print(tables(rows))
    return 0 if all(row.judged.outcome.is_right for row in rows) else 1


def _missing() -> list[str]:
    """Programs that need a package that is not here."""
    missing = [p.name for p in PROGRAMS.values() if p.needs and importlib.util.find_spec(p.needs) is None]
    if missing:
        print(f"left out, a package is missing: {', '.join(missing)}", flush=True)
    return missing


def _num_gpus() -> int:
    """Number of GPUs of this machine; prints the programs that need more ranks, which are left out."""
    import torch

    num_gpus: int = torch.cuda.device_count()
    large = [program.name for program in PROGRAMS.values() if min(program.world_sizes) > num_gpus]
    print(f"{num_gpus} GPUs; left out, more ranks are needed: {', '.join(large) or 'none'}", flush=True)
    return num_gpus


def _cases(args: argparse.Namespace, without: Sequence[str], max_ranks: int) -> list[Case]:
    kinds = {"both": ("fault", "healthy"), "faults": ("fault",), "healthy": ("healthy",)}[args.kind]
    made: list[Case] = []
    for kind in kinds:
        make = fault_case if kind == "fault" else healthy_case
        drawn = {"program": args.program, "without": without, "max_ranks": max_ranks}
        if args.each:
            fitting = _fitting_operators(kind, args.program, without)
            made += [make(args.seeds[0], operator=name, **drawn) for name in fitting]
        else:
            made += [make(seed, operator=args.operator, **drawn) for seed in args.seeds]
    return _seen(made)


def _fitting_operators(kind: str, program: str, without: Sequence[str]) -> list[str]:
    """Names of the operators that fit the program, or any program when it is ""."""
    fitting = set()
    for name_of_program, operator in pairs(kind, without=without):
        if program in ("", name_of_program):
            fitting.add(operator)
    return sorted(fitting)


def _seen(cases: Sequence[Case]) -> list[Case]:
    """The cases that show in this version of torch; prints those that do not."""
    version = metadata.version("torch")
    seen = []
    for case in cases:
        if is_unseen(case, version):
            print(f"left out, torch {version} asks no guard there: {case.name}", flush=True)
        else:
            seen.append(case)
    return seen
