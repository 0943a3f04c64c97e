"""Number of a run -> a program with its parameters, started on its ranks, and whether that was an alarm."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from tpcompile.faults.healthy import EVERY, PROGRAMS
from tpcompile.faults.healthy.frame import Draw, Program
from tpcompile.faults.healthy.main import ROOT, Row, prepare, torchrun
from tpcompile.process_tree import Outcome, run_tree

PLANS = (
    (("inductor", "cold"), ("inductor", "warm"), ("aot_eager", "none"), ("inductor", "shared")),
    (("aot_eager", "none"), ("inductor", "cold"), ("inductor", "split"), ("inductor", "warm")),
)
"""(backend, state of the caches) of a program's first, second, ... run; programs take turns."""
_SLOW = 0.15
"""Part of the runs with one slow rank."""
_TIMEOUT_S = 180.0
_MOST_RANKS = 8
"""On a CPU."""
_TO_LOG = 'exec "$0" "$@" > "$LOG" 2>&1'


def plan(number: int, *, programs: list[str], seed: int, nproc: int, most: int) -> tuple[Program, Draw, str]:
    """Program, parameters and state of the caches of the run of that number, on `most` ranks at most."""
    round_, place = divmod(number, len(programs))
    program = EVERY[programs[place]]
    steps = PLANS[place % len(PLANS)]
    backend, state = steps[round_ % len(steps)]
    if backend not in program.backends:
        backend, state = program.backends[0], "none" if program.backends[0] == "aot_eager" else "cold"
    # Inductor's runs of a cycle must compile the same, or a warm cache holds nothing for them.
    cycle = round_ // len(steps) if backend == "inductor" else 1000 + round_
    slow = random.Random(f"{seed} {number}").random() < _SLOW
    return program, program.draw(seed + 10_000 * cycle, backend=backend, slow=slow, nproc=nproc, most=most), state


def sentinel_run(number: int, folder: Path, args: argparse.Namespace) -> Row:
    """One run under the sentinel; exit code 0 when nobody raised an alarm."""
    most = torch.cuda.device_count() if args.device == "cuda" else _MOST_RANKS
    first, every = args.part
    names = [name for name in args.programs or PROGRAMS if min(EVERY[name].sizes) <= most][first - 1 :: every]
    if not names:
        raise SystemExit(f"none of the programs of part {first}/{every} runs on {most} ranks")
    program, draw, state = plan(number, programs=names, seed=args.seed, nproc=args.nproc, most=most)
    out, hash_seed = folder / f"run_{number}", random.randrange(1 << 31)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    caches = folder / "caches" / program.name
    prepare(state, caches, draw.nproc)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        "OMP_NUM_THREADS": "1", **os.environ, "SEED": str(hash_seed), "CACHES": str(caches), "LOG": str(out / "log"),
        "SHARED_CACHE": "shared" if state == "shared" else "", "PYTHONPATH": os.pathsep.join(paths),
    }  # fmt: skip
    rank = ["--draw", draw.to_json(), "--device", args.device, "--out", str(out)]
    if args.device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers puts its mesh on a GPU when it sees one
    command = ["sh", "-c", _TO_LOG, *torchrun(draw.nproc, Path(__file__).with_name("rank.py")), *rank]
    start = time.perf_counter()
    timeout_s = args.timeout_s or _TIMEOUT_S
    outcome = run_tree(command, environ=environ, timeout_s=timeout_s)
    if outcome.signal:
        raise KeyboardInterrupt
    wall_s = round(time.perf_counter() - start, 1)
    ranks = _results(out)
    alarms = [f"no end after {timeout_s:g} s"] if outcome.timed_out else []
    alarms += judged(program, draw, outcome, ranks, verdicts=[str(path) for path in out.glob("verdict_*/verdict.json")])
    summary = "; ".join(alarms) or f"{sum(rank['compiles'] for rank in ranks.values())} compiles"
    if alarms:
        print((out / "log").read_text()[-4000:], flush=True)
    elif not args.keep:
        shutil.rmtree(out)
    code = 124 if outcome.timed_out else int(bool(alarms))
    waits = sum(len(rank["warnings"]) for rank in ranks.values())
    return {
        "program": program.name, "backend": draw.backend, "cache": state, "seed": hash_seed, "exit_code": code,
        "wall_s": wall_s, "summary": summary, "warnings": waits, "draw": json.loads(draw.to_json()),
    }  # fmt: skip


def judged(
    program: Program, draw: Draw, outcome: Outcome, ranks: dict[int, dict[str, Any]], *, verdicts: list[str]
) -> list[str]:
    """Everything that makes the run an alarm, in words."""
    alarms = [f"exit code {outcome.exit_code}"] if outcome.exit_code else []
    alarms += [f"a verdict in {path}" for path in verdicts]
    missing = [rank for rank in range(draw.nproc) if rank not in ranks]
    alarms += [f"no result of rank {rank}" for rank in missing]
    for rank, found in sorted(ranks.items()):
        alarms += [f"rank {rank}: {finding}" for finding in found["findings"]]
        stopped = [text for text in found["warnings"] if "stopped watching" in text]
        if stopped or found["stopped_watching"]:
            alarms.append(f"rank {rank}: {'; '.join(stopped) or 'the sentinel was not active at the end'}")
    if not missing:
        alarms += _compiles(program, ranks)
    return alarms


def _compiles(program: Program, ranks: dict[int, dict[str, Any]]) -> list[str]:
    """Ranks of one group that compiled another number of times; and a program that compiles nothing tests nothing."""
    counts: dict[str, dict[int, int]] = {}
    for rank, found in sorted(ranks.items()):
        counts.setdefault(found["domain"], {})[rank] = found["compiles"]
    unequal = [f"compiles by rank {own}" for own in counts.values() if len(set(own.values())) > 1]
    nothing = [f"nothing compiled on {domain}" for domain, own in counts.items() if not any(own.values())]
    return nothing + ([] if program.compiles_differ else unequal)


def _results(out: Path) -> dict[int, dict[str, Any]]:
    files = {int(path.stem.removeprefix("rank_")): path for path in out.glob("rank_*.json")}
    return {rank: json.loads(path.read_text()) for rank, path in files.items()}
