"""Tokens per second of greedy decoding beside transformers' tensor parallelism, on a Llama that is made from a config.

    python scripts/bench_decoding.py --nproc 2 --json FILE [--layers 32] [--programs ours:graphed,transformers]

eager                          ours in eager mode: its tokens are what the others' are compared with
ours, ours:graphed, ours:graphed:by-size
                               ours compiled; single tokens by `tpcompile.run`, e.g. as CUDA graphs
ours:fast:graphed:by-size      single tokens with every fast path that can run, which is none on a CPU
transformers, transformers:reduce-overhead
                               its plan `tp_plan="auto"`, a static cache, and a compiled step of `generate` in that mode

All have the same weights, which each rank draws one parameter at a time (decoding_ranks.py). Each program is in
processes of its own: they compile at the same time, warm up one by one, and are asked in turn. A round is a prompt and
all new tokens, and the same prompt with one new token: the rate is that of the tokens between. A round in which they
took no measurable time has no rate (a tiny model, a busy machine). In bfloat16 a rounding can decide between two
tokens; `equal` counts those before the first that differs, and `--dtype float32` is the comparison of greedy tokens.
Exit status 1 when a program of ours fails, or when its tokens differ in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpcompile.bench.processes import ProgramFailed, RankLost, Ranks
from tpcompile.bench.run import in_turn
from tpcompile.bench.worker import Task

ROOT = Path(__file__).resolve().parents[1]
SERVER = "scripts.decoding_ranks:serve"
BEGAN = time.monotonic()
EAGER = "eager"
UNMEASURED = "-"
PROGRAMS = (
    EAGER, "ours", "ours:graphed", "ours:graphed:by-size", "ours:fast:graphed:by-size", "transformers",
    "transformers:reduce-overhead",
)  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor", help="of torch.compile")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--small", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    everywhere = [name for name in PROGRAMS if ":fast" not in name]
    parser.add_argument("--programs", default=",".join(everywhere))
    parser.add_argument("--timeout-s", type=float, default=150.0, help="for each answer of a rank")
    parser.add_argument("--logs", type=Path, help="folder of the ranks' output; default: a new one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    unknown = set(arguments.programs.split(",")) - set(PROGRAMS)
    if unknown:
        parser.error(f"unknown programs: {', '.join(sorted(unknown))}; choose from {', '.join(PROGRAMS)}")
    if arguments.new < 3 or arguments.rounds < 1:
        parser.error(f"--new {arguments.new} --rounds {arguments.rounds}: at least 3 new tokens and 1 round")
    return arguments


def main(arguments: argparse.Namespace) -> int:
    """Start all programs, then rounds in turn; a table, JSON, and whether ours are right."""
    sys.path.append(str(ROOT))  # of the ranks as well: `examples`, `scripts`
    names = [EAGER, *(name for name in arguments.programs.split(",") if name != EAGER)]
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="bench-decoding-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"output of the ranks: {logs}")
    share_cores(len(names) * arguments.nproc)
    programs = [Program(name) for name in names]
    try:
        at_once(programs, lambda program: program.start(arguments, logs))
        for program in programs:
            program.warm()
        say(memory_line([program.row for program in programs]))
        for number in range(arguments.rounds):
            for program in in_turn(programs, number):
                program.round(arguments)
        code = reported(programs, arguments)
        at_once(programs, lambda program: program.end(Ranks.close))
    finally:
        for program in programs:
            program.end(Ranks.kill)
    return code


def say(text: str) -> None:
    """With the seconds since this process began."""
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


def share_cores(num_processes: int) -> None:
    """Of processes that compile at the same time."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_processes))
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, threads)


def at_once(programs: Sequence[Program], step: Callable[[Program], None]) -> None:
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(step, programs))


class Program:
    """The ranks of one, and its row; one that fails says why, and the others go on."""

    def __init__(self, name: str) -> None:
        self.row: dict[str, Any] = {"name": name, "why_not": ""}
        self.tokens: list[list[int]] = []
        self.machine: dict[str, str] = {}
        self._ranks: Ranks | None = None
        self._rounds: list[dict[str, float]] = []
        self._rates: list[float] = []

    def start(self, arguments: argparse.Namespace, logs: Path) -> None:
        """Build, compile and call it, while others do."""
        name: str = self.row["name"]
        task = {
            "program": name, "settings": json.dumps({**vars(arguments), "json": None, "logs": None}), "environ": {},
            "timeout_s": arguments.timeout_s, "server": SERVER,
        }  # fmt: skip
        asked = Task(**task, log=str(logs / name.replace(":", "-")))
        self._ranks = Ranks.started(asked, arguments.nproc, is_gpu=arguments.device == "cuda")
        with self._failing() as ranks:
            answer = ranks.ask("build")[0]
            self._say("is built")
            ranks.ask("first_call")
            self.machine = answer.pop("machine")
            self.row |= answer
            self._say("is compiled")

    def warm(self) -> None:
        """Capture it and take its tokens, while no other program runs."""
        if self._is_over:
            return
        with self._failing() as ranks:
            answer = ranks.ask("warm")[0]
            self.tokens = answer.pop("tokens")
            self.row |= answer | {"ready_s": time.monotonic() - BEGAN}
            self._say("is ready")

    def round(self, arguments: argparse.Namespace) -> None:
        """By the slowest rank."""
        if self._is_over:
            return
        with self._failing() as ranks:
            answers = ranks.ask("round")
            times = {name: max(answer[name] for answer in answers) for name in answers[0]}
            self._rounds.append(times)
            rate = tokens_per_s(times, arguments.batch * (arguments.new - 1))
            if rate is None:
                self._say(f"{UNMEASURED} tokens/s: all tokens took no longer than the first")
                return
            self._rates.append(rate)
            self._say(f"{rate:.1f} tokens/s")

    def summed_up(self, expected: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Its row, with how many tokens equal the expected ones; None where there are none to compare with."""
        if self._is_over:
            return {name: self.row[name] for name in ("name", "why_not")}
        return self.row | {
            "tokens_per_s": statistics.median(self._rates) if self._rates else None,
            "spread": [min(self._rates), max(self._rates)] if self._rates else None,
            "prompt_ms": statistics.median(times["first_s"] for times in self._rounds) * 1e3,
            "equal": equal_tokens(self.tokens, expected) if expected else None,
        }

    def end(self, how: Callable[[Ranks], None]) -> None:
        if self._ranks is not None:
            how(self._ranks)

    @property
    def _is_over(self) -> bool:
        return bool(self.row["why_not"])

    @contextmanager
    def _failing(self) -> Iterator[Ranks]:
        assert self._ranks is not None, "it was started"
        try:
            yield self._ranks
        except (ProgramFailed, RankLost) as error:
            self.row["why_not"] = str(error)
            self._say(str(error))
            self._ranks.kill()

    def _say(self, text: str) -> None:
        say(f"{self.row['name']}: {text}")


def tokens_per_s(times: Mapping[str, float], num_tokens: int) -> float | None:
    """Of the tokens behind the first; None where all of them took no longer than the first alone, which is noise."""
    between_s = times["all_s"] - times["first_s"]
    return num_tokens / between_s if between_s > 0 else None


def reported(programs: Sequence[Program], arguments: argparse.Namespace) -> int:
    """Print and write; 1 when ours are wrong."""
    eager = programs[0]
    rows = [program.summed_up(eager.tokens) for program in programs]
    for row in rows:
        print(shown(row))
    if arguments.json:
        fields = ("nproc", "layers", "dtype", "batch", "prompt", "new", "rounds", "backend")
        machine = {name: getattr(arguments, name) for name in fields} | eager.machine
        report = {"command": " ".join(["python", *sys.argv]), "machine": machine, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(is_wrong(row, arguments) for row in rows))


def is_wrong(row: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    """Ours has failed, or has tokens of its own where a rounding is no excuse."""
    if row["name"].startswith("transformers"):
        return False
    return bool(row["why_not"]) or (arguments.dtype == "float32" and row["equal"] != arguments.new)


def equal_tokens(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """New tokens before the first that differs, of the sequence in which that comes first."""
    return min(
        next((at for at, (one, other) in enumerate(zip(*pair, strict=True)) if one != other), len(pair[0]))
        for pair in zip(found, expected, strict=True)
    )


def memory_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """The peak of each, and what all of them hold on the first GPU."""
    found = [row for row in rows if row.get("peak_gb") is not None]
    if not found:
        return "memory: not measured"
    peaks = ", ".join(f"{row['name']} {row['peak_gb']:.2f}" for row in found)
    used, total = max(row["device_gb"] for row in found)
    return f"memory, peak in GB: {peaks}; all hold {used:.1f} of {total:.1f} GB"


def shown(row: Mapping[str, Any]) -> str:
    if row["why_not"]:
        return f"{row['name']:30} {row['why_not']}"
    rate = UNMEASURED if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}"
    return (
        f"{row['name']:30} {rate:>9} tokens/s  prompt {row['prompt_ms']:8.2f} ms  regions "
        f"{row['regions_per_token']}  equal {row['equal']}"
    )


if __name__ == "__main__":
    sys.exit(main(parsed()))
