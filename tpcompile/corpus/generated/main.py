"""Arguments -> a sweep, its tables and its results; the body of scripts/generated_faults.py."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tpcompile.corpus.generated.names import Route
from tpcompile.corpus.generated.operators import FAULTS, HEALTHY
from tpcompile.corpus.generated.plan import HELD_OUT, Case, fault_case, healthy_case, pairs
from tpcompile.corpus.generated.programs_list import PROGRAMS

_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch._dynamo.convert_frame",
    "torch._dynamo.backends.common",
    "torch._inductor.compile_fx",
    "torch._functorch.aot_autograd",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed._functional_collectives",
    "tpcompile.corpus.generated.frame",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 when all is as it should be."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.list:
        _list()
        return 0
    if max(args.seeds) >= HELD_OUT and not args.held_out:
        parser.error(f"seeds from {HELD_OUT} on are held out: they measure, nobody develops on them (--held-out)")
    return _sweep(args)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="generated faults of rank divergence")
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0-19"), help="N or FIRST-LAST")
    parser.add_argument("--kind", choices=["faults", "healthy", "both"], default="faults")
    parser.add_argument("--routes", type=_routes, default=tuple(Route), help="separated by commas; default: all")
    parser.add_argument("--program", default="", help="draw only from this program")
    parser.add_argument("--operator", default="", help="draw only from this operator")
    parser.add_argument(
        "--each", action="store_true", help="every operator once, in a drawn program, for the first seed"
    )
    parser.add_argument("--jobs", type=int, default=2, help="cases side by side")
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
    from tpcompile.corpus.generated.forked import preload
    from tpcompile.corpus.generated.sweep import Row, Settings, sweep
    from tpcompile.corpus.generated.table import line_of, results, tables

    needed = {program.needs for program in PROGRAMS.values() if program.needs}
    missing = set(preload([*_PRELOADED, *sorted(needed)])) & needed
    without = [program.name for program in PROGRAMS.values() if program.needs in missing and program.needs]
    if without:
        print(f"left out, {', '.join(sorted(missing))} is missing: {', '.join(without)}", flush=True)
    if args.nccl:
        without += _too_large()

    def report(row: Row) -> None:
        print(line_of(row), flush=True)

    with tempfile.TemporaryDirectory(prefix="generated-") as temporary:
        settings = Settings(
            routes=args.routes,
            directory=(args.keep or Path(temporary)).absolute(),
            caches=Path(tempfile.gettempdir()) / "tpcompile-generated-cpp",
            jobs=args.jobs,
            keep=args.keep is not None,
            is_nccl=args.nccl,
        )
        rows = sweep(_cases(args, without), settings, report=report)
    print(tables(rows))
    if args.json:
        command = shlex.join(["scripts/generated_faults.py", *sys.argv[1:]])
        args.json.write_text(json.dumps(results(rows, command=command), indent=1, sort_keys=True) + "\n")
    return 0 if all(row.judged.outcome.is_right for row in rows) else 1


def _too_large() -> list[str]:
    """Programs that need more ranks than there are GPUs."""
    import torch

    num_gpus = torch.cuda.device_count()
    large = [program.name for program in PROGRAMS.values() if min(program.world_sizes) > num_gpus]
    print(f"{num_gpus} GPUs; left out, more ranks are needed: {', '.join(large) or 'none'}", flush=True)
    return large


def _cases(args: argparse.Namespace, without: Sequence[str]) -> list[Case]:
    made: list[Case] = []
    kinds: list[tuple[Callable[..., Case], bool]] = [
        (fault_case, args.kind != "healthy"),
        (healthy_case, args.kind != "faults"),
    ]
    for make, is_wanted in kinds:
        if not is_wanted:
            continue
        if args.each:
            operators = FAULTS if make is fault_case else HEALTHY
            made += [make(args.seeds[0], program=args.program, operator=operator.name) for operator in operators]
        else:
            made += [make(seed, program=args.program, operator=args.operator, without=without) for seed in args.seeds]
    return made
