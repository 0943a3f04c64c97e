#!/usr/bin/env python
"""False positives: N runs of correct programs, each must be green.

    scripts/clean_runs.py --runs 20 --nproc 2 --preset cpu_smoke [--train] [--json FILE]
    scripts/clean_runs.py --what sentinel --runs 200 [--programs NAME ...] [--device cuda] [--json FILE]
    scripts/clean_runs.py --what sentinel --runs 100 --part 1/2 --json A & # and 2/2, B: beside each other, then
    scripts/clean_runs.py --merge A B --json FILE

`--what gate` runs our block through the gate. `--what sentinel` runs the programs of `healthy/` in rotation, their
parameters drawn anew, each under a sentinel that stops the job when it finds something.

Every rank gets a PYTHONHASHSEED and an Inductor cache of its own. Runs cycle through states of
these caches: cold (all empty), warm (all filled by the run before), split (filled, but for the last rank's); with the
sentinel also shared (one empty cache for all ranks), and none (a backend without a cache).

A run is an alarm when it ends with an exit code other than 0, or not in time; with the sentinel also when a verdict was
written, a sentinel has a finding or stopped watching, a rank left no result, or ranks of one tensor-parallel group
compiled a different number of times without the program saying so. Exit 1 on any alarm.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.faults.alarms import alarms, found_by_rank
from tests.faults.case import load
from tests.faults.healthy.program import Draw, Program
from tests.faults.matrix import made_with
from tests.faults.run import Ended, Launch, finished
from tpcompile.choices import Device
from tpcompile.evidence.rundir import RunDir
from tpcompile.request import RunRequest

STATES = ("cold", "warm", "split")
PLANS = (
    (("inductor", "cold"), ("inductor", "warm"), ("aot_eager", "none"), ("inductor", "shared")),
    (("aot_eager", "none"), ("inductor", "cold"), ("inductor", "split"), ("inductor", "warm")),
)
"""(backend, state of the caches) of a program's first, second, ... run; programs take turns."""
_SLOW = 0.15
"""Part of the runs with one slow rank."""
_GATE_LIMIT_S = 900.0
_MOST_RANKS = 8
"""On a CPU."""
Row = dict[str, Any]


def gate_run(number: int, folder: Path, args: argparse.Namespace) -> Row:
    """One run of the gate: exit code of the verdict, 124 at the time limit, and its one line."""
    state = STATES[number % len(STATES)]
    nproc = args.nproc or 2
    limit_s = args.timeout_s or _GATE_LIMIT_S
    run_dir = folder / f"run_{number}"
    device: Device = "cuda" if torch.cuda.device_count() >= nproc else "cpu"
    gate = RunDir.create(folder / f"gate_{number}")
    gate.write_config(RunRequest(preset=args.preset, train=args.train).config(device).model_dump_json(indent=1))
    command = ("-m", "tpcompile.gate", str(gate.path))
    ended, row = _timed(command, run_dir, state, nproc=nproc, limit_s=limit_s, gpus=None)
    verdict = gate.read_verdict()
    if ended.is_hang:
        code, summary = 124, f"still running after {limit_s:g} s"
    elif verdict is None or (verdict.exit_code == 0 and ended.codes[0] != 0):
        code = ended.codes[0] or 3
        summary = f"torchrun ended with {ended.codes[0]}, verdict {verdict and verdict.summary}"
    else:
        code, summary = verdict.exit_code, verdict.summary
    return row | {"exit_code": code, "summary": summary}


def sentinel_run(number: int, folder: Path, args: argparse.Namespace) -> Row:
    """One run under the sentinel; exit code 0 when it raised no alarm."""
    most = torch.cuda.device_count() if args.device == "cuda" else _MOST_RANKS
    programs = _programs(args, most)
    program, draw, state = plan(number, programs=programs, seed=args.seed, nproc=args.nproc, most=most)
    run_dir, limit_s = folder / f"run_{number}", args.timeout_s or program.limit_s
    shutil.rmtree(run_dir, ignore_errors=True)
    command = program.command(run_dir, "--draw", draw.to_json())
    gpus = "" if args.device == "cpu" else None  # transformers puts its mesh on a GPU when it sees one
    ended, row = _timed(command, run_dir, state, nproc=draw.nproc, limit_s=limit_s, gpus=gpus, caches=program.name)
    ranks = found_by_rank(run_dir)
    found = alarms(program, draw, run_dir, ended)
    if found:
        print((run_dir / "log.txt").read_text()[-4000:], flush=True)
    elif not args.keep:
        shutil.rmtree(run_dir)
    return row | {
        "program": program.name,
        "backend": draw.backend,
        "exit_code": 124 if ended.is_hang else int(bool(found)),
        "summary": "; ".join(found) or f"{sum(rank['compiles'] for rank in ranks.values())} compiles",
        "warnings": sum(len(rank["warnings"]) for rank in ranks.values()),
        "draw": json.loads(draw.to_json()),
    }


def _timed(
    command: tuple[str, ...],
    run_dir: Path,
    state: str,
    *,
    nproc: int,
    limit_s: float,
    gpus: str | None,
    caches: str = "",
) -> tuple[Ended, Row]:
    """Start the ranks, with caches in that state; how they ended, and what a row says of that."""
    folder = run_dir.parent / "caches" / caches
    prepare(state, folder, nproc)
    seed = random.randrange(1 << 31)
    launch = Launch(
        out=run_dir,
        command=command,
        world_size=nproc,
        limit_s=limit_s,
        environ={"OMP_NUM_THREADS": "1"},  # compiling in worker processes is part of what is run
        own=own_variables(state, folder, nproc=nproc, seed=seed),
    )
    slot = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    ((_, ended),) = finished([launch], [slot])
    return ended, {"cache": state, "seed": seed, "wall_s": round(ended.wall_s, 1)}


def prepare(state: str, caches: Path, nproc: int) -> None:
    """Bring the ranks' caches, as the run before left them, into that state."""
    emptied = {"cold": range(nproc), "split": (nproc - 1,), "shared": ("shared",)}.get(state, ())
    for owner in emptied:
        shutil.rmtree(caches / str(owner), ignore_errors=True)


def own_variables(state: str, caches: Path, *, nproc: int, seed: int) -> Mapping[int, Mapping[str, str]]:
    """Rank -> its hash seed and its cache."""
    found = {}
    for rank in range(nproc):
        cache = caches / ("shared" if state == "shared" else str(rank))
        found[rank] = {"PYTHONHASHSEED": str(seed + rank), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return found


def _asked(names: Sequence[str]) -> list[Program]:
    """The healthy programs of these names; without names, all that are known to be clean."""
    programs = _healthy()
    if not names:
        return [program for program in programs.values() if program.is_clean]
    unknown = sorted(set(names) - programs.keys())
    if unknown:
        raise SystemExit(f"no healthy programs: {', '.join(unknown)}; see `scripts/faults.py list`")
    return [programs[name] for name in names]


def _healthy() -> dict[str, Program]:
    return {name: case for name, case in load("healthy").items() if isinstance(case, Program)}


def _programs(args: argparse.Namespace, most: int) -> list[Program]:
    """The programs that take turns, on `most` ranks at most."""
    first, of = args.part
    runnable = [program for program in _asked(args.programs) if min(program.sizes) <= most]
    of_part = runnable[first - 1 :: of]
    if not of_part:
        raise SystemExit(f"none of the programs of part {first}/{of} runs on {most} ranks")
    return of_part


def plan(number: int, *, programs: list[Program], seed: int, nproc: int, most: int) -> tuple[Program, Draw, str]:
    """Program, parameters and state of the caches of the run of that number, on `most` ranks at most."""
    round_, place = divmod(number, len(programs))
    program = programs[place]
    steps = PLANS[place % len(PLANS)]
    backend, state = steps[round_ % len(steps)]
    if backend not in program.backends:
        backend = program.backends[0]
        state = "none" if program.backends[0] == "aot_eager" else "cold"
    # Inductor's runs of a cycle must compile the same, or a warm cache holds nothing for them.
    cycle = round_ // len(steps) if backend == "inductor" else 1000 + round_
    slow = random.Random(f"{seed} {number}").random() < _SLOW
    return program, program.draw(seed + 10_000 * cycle, backend=backend, slow=slow, nproc=nproc, most=most), state


def all_runs(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Every run, one line each as it ends."""
    rows: list[Row] = []
    one_run = gate_run if args.what == "gate" else sentinel_run
    for number in range(args.first, args.first + args.runs):
        row = one_run(number, folder, args)
        rows.append(row)
        what = f"{row['program']:30} {row['backend']:9} " if "program" in row else ""
        line = f"{what}{row['cache']:6} seed {row['seed']:<10} exit {row['exit_code']} {row['wall_s']:6.1f} s"
        print(f"{number + 1:3}/{args.first + args.runs} {line}  {row['summary']}", flush=True)
        if args.json:
            write(args.json, rows)
    return rows


def write(path: Path, rows: list[Row]) -> None:
    """Everything so far as JSON: a run of hours that is cut off keeps what it has."""
    alarms = [row for row in rows if row["exit_code"] != 0]
    result = {**made_with(sys.argv), "runs": len(rows), "false_alarms": len(alarms), "rows": rows}
    path.write_text(json.dumps(result, indent=1) + "\n")


def merge(paths: list[Path], out: Path | None) -> list[Row]:
    """The rows of several files as one file, with what they were made on; refuses to mix machines or versions."""
    found = _read(paths)
    made = _made_on(found)
    rows = [row for one in found for row in one["rows"]]
    commands = {re.sub(r"\S+\.json|\b\d+(?=/\d+\b)", "*", one["command"]) for one in found}
    counts = {"runs": len(rows), "false_alarms": sum(row["exit_code"] != 0 for row in rows)}
    if out is not None:
        head = {"command": f"{len(found)} beside each other: {' | '.join(sorted(commands))}"} | made | counts
        out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return rows


def _read(paths: list[Path]) -> list[dict[str, Any]]:
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise SystemExit(f"not merged: {', '.join(missing)} is not there; did its part end?")
    return [json.loads(path.read_text()) for path in paths]


def _made_on(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Machine and versions of the files, which have the same."""
    made = [{key: one[key] for key in ("machine", "python", "torch")} for one in found]
    if any(one != made[0] for one in made):
        raise SystemExit(f"not merged: made on {made}")
    return made[0]


def part(text: str) -> tuple[int, int]:
    """`2/3` -> (2, 3)."""
    number, _, of = text.partition("/")
    if not (number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N")
    return int(number), int(of)


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=["gate", "sentinel"], default="gate")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first run, to go on with a rotation")
    parser.add_argument("--nproc", type=int, default=0, help="ranks; default: 2 for the gate, drawn for the sentinel")
    parser.add_argument("--preset", default="cpu_smoke", help="of the gate")
    parser.add_argument("--train", action="store_true", help="the gate with a backward pass")
    parser.add_argument("--programs", nargs="+", default=[], metavar="NAME", help="some programs only")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="for the sentinel")
    parser.add_argument("--seed", type=int, default=0, help="the sentinel's runs are drawn from it")
    parser.add_argument("--part", type=part, default=(1, 1), metavar="K/N", help="every N-th program from the K-th on")
    parser.add_argument("--merge", type=Path, nargs="+", metavar="FILE", help="put what --json wrote into one file")
    parser.add_argument("--keep", type=Path, help="where to keep caches, and logs of alarms; default: nowhere")
    parser.add_argument("--timeout-s", type=float, default=0, help="for one run; default: 900 gate, 180 sentinel")
    parser.add_argument("--json", type=Path, help="write the summary there too")
    return parser.parse_args()


def main() -> int:
    """Run, count alarms, print the summary."""
    args = options()
    with tempfile.TemporaryDirectory() as folder:
        rows = merge(args.merge, args.json) if args.merge else all_runs(args.keep or Path(folder), args)
    alarms = [row for row in rows if row["exit_code"] != 0]
    result: dict[str, Any] = {"runs": len(rows), "false_alarms": len(alarms)}
    if not args.merge:
        result |= made_with(sys.argv)
    result["alarms"] = alarms
    print(json.dumps(result, indent=1))
    return int(bool(alarms))


if __name__ == "__main__":
    raise SystemExit(main())
