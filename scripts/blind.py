"""Programs whose faults were written down before -> found or not, and whether rank, cause and line are right.

    scripts/blind.py OUT FOLDER ... [--jobs N] [--limit S] [--backend gloo|nccl] [--python FILE]

A FOLDER holds one program per folder: `main.py` with its modules, and `truth.json`:

    {"ranks": 2, "healthy": false, "guilty": [1], "lines": ["engine.py:41"], "cause": ["branch", "fewer steps"],
     "what": "one sentence", "nccl": false}

Each runs once under torchrun; one that does not import tpcompile, under `tpcompile run`. A folder with `target.py` in
place of `main.py` is a program whose numbers are wrong or right, and runs in `tpcompile gate --target target:build`:

    {"ranks": 2, "dtype": "float32", "right": false, "lines": ["target.py:22"], "kind": ["not summed"],
     "what": "one sentence"}

Write the programs without looking at tpcompile's code, and the truth before the first run. Logs, run directories and
`rows.json` are left in OUT. Whether a kind is right is judged by the author's words here; read the wrong ones by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from tpcompile.evidence.records import Lead, UserLine, Verdict
from tpcompile.evidence.records.causes import Cause
from tpcompile.evidence.timeline.conclude import led_to_text
from tpcompile.process_tree import run_tree

ROOT = Path(__file__).resolve().parents[1]
_QUIET = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "COLUMNS": "200"}
_GRACE_S = 3.0


class Truth(BaseModel):
    """What the author of a program wrote down."""

    model_config = ConfigDict(extra="forbid")
    ranks: int
    healthy: bool
    what: str
    nccl: bool = False
    guilty: tuple[int, ...] = ()
    """Empty where the ranks differ and none of them is the odd one."""
    lines: tuple[str, ...] = ()
    """`file.py:12`: where the differing value arises, what passes it on, and the branch that acts on it."""
    cause: tuple[str, ...] = Field((), validation_alias=AliasChoices("cause", "kind"))
    """Words of which a right explanation has one."""
    dtype: str = ""
    right: bool | None = None
    """Of a program whose numbers are wrong or right: whether they are right."""

    @model_validator(mode="before")
    @classmethod
    def _right_is_healthy(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {"healthy": fields["right"], **fields} if "right" in fields else fields


def main() -> None:
    """Run all programs and print one line for each, then the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120.0, metavar="S")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="programs whose names begin so")
    parser.add_argument("--judge", action="store_true", help="judge what an earlier call left in OUT once more")
    options = parser.parse_args()
    programs = [file.parent for folder in options.folders for file in sorted(folder.glob("*/truth.json"))]
    truths = {program: Truth.model_validate_json((program / "truth.json").read_text()) for program in programs}
    if options.backend == "nccl":
        programs = [program for program in programs if truths[program].nccl and not truths[program].healthy]
    if options.only:
        programs = [program for program in programs if program.name.startswith(tuple(options.only))]

    with ProcessPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(_told, program, truths[program], options) for program in programs]
        rows = [job.result() for job in jobs]
    (options.out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(_sums(rows))


def _told(program: Path, truth: Truth, options: argparse.Namespace) -> dict[str, Any]:
    out = options.out / program.parent.name / program.name
    if not options.judge:
        (out / "ended.json").write_text(json.dumps(run(program, truth, out, options)))
    row = judged(program, truth, out / "program", json.loads((out / "ended.json").read_text()))
    print(_line(row), flush=True)
    return row


def run(program: Path, truth: Truth, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One program once, and how it ended; no process of it is left when this returns."""
    here = out / "program"
    shutil.copytree(program, here, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    route, command = _command(truth, here, options.python)
    environ = {**os.environ, **_QUIET, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if options.backend == "gloo":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    log = out / "log.txt"
    began_s = time.monotonic()
    with log.open("w") as stream:
        ended = run_tree(["sh", "-c", 'cd "$0" && exec "$@" 2>&1', str(here), *command], environ=environ,
                         timeout_s=options.limit, grace_s=_GRACE_S, stdout=stream)  # fmt: skip
    return {
        "route": route,
        "exit_code": ended.exit_code,
        "timed_out": ended.timed_out,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _command(truth: Truth, here: Path, python: str) -> tuple[str, list[str]]:
    """The route of a program, and how it is started in its folder."""
    number = str(truth.ranks)
    if not (here / "main.py").exists():
        target = ["--target", "target:build", "--nproc", number, "--device", "cpu", "--run-dir", "runs/run"]
        return "gate", [python, "-m", "tpcompile", "gate", *target]
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", number, "main.py"]
    if any("tpcompile" in file.read_text() for file in here.rglob("*.py")):
        return "Sentinel", torchrun
    return "run", [python, "-m", "tpcompile", "run", "--run-dir", "runs/run", "--", *torchrun]


def judged(program: Path, truth: Truth, here: Path, ended: dict[str, Any]) -> dict[str, Any]:
    """The row of a program: of a broken one what is right, of a healthy one whether there was an alarm."""
    files = sorted(here.rglob("verdict.json"), key=lambda file: file.stat().st_mtime)
    verdict = Verdict.model_validate_json(files[-1].read_text()) if files else None
    lead = verdict.lead if verdict is not None and verdict.exit_code == 1 else None
    row = {"set": program.parent.name, "name": program.name, "ranks": truth.ranks, "healthy": truth.healthy, **ended}
    says = _says(lead)
    if truth.healthy:
        return {**row, "alarm": lead is not None, "says": says}
    found = lead is not None and not ended["timed_out"]
    right = _right(truth, lead) if lead is not None and found else {}
    return {
        **row,
        "found": found,
        "right": right,
        "truth": truth.model_dump(exclude={"ranks", "healthy"}),
        "says": says,
    }


def _right(truth: Truth, lead: Lead) -> dict[str, bool]:
    """With two ranks both may be shown, and nobody is blamed."""
    shown = set(lead.ranks)
    is_open = shown == set(range(truth.ranks)) and (not truth.guilty or truth.ranks == 2)
    text = " ".join((lead.cause.value, lead.says, lead.consequence, lead.do_first, _code(lead))).lower()
    return {
        "rank": truth.right is not None or is_open or shown == set(truth.guilty),
        "line": any(map(_is_at(lead.line), truth.lines)),
        "cause": any(word.lower() in text for word in truth.cause),
    }


def _is_at(line: UserLine | None) -> Callable[[str], bool]:
    """Whether a place of the truth, relative to the program's folder, is that line."""
    return lambda place: line is not None and f"/{line.file}:{line.line}".endswith(f"/{place}")


def _place(line: UserLine | None) -> str:
    return f"{Path(line.file).name}:{line.line}" if line is not None else ""


def _code(lead: Lead) -> str:
    return f"{lead.line.code} {led_to_text(lead.parted) if lead.parted else ''}" if lead.line else ""


def _says(lead: Lead | None) -> str:
    if lead is None:
        return ""
    ranks = ", ".join(map(str, lead.ranks)) or "none"
    says = f"{lead.cause.value}; ranks {ranks}{'' if lead.is_rank_known else ' differ'}; {_place(lead.line)}"
    return f"{says}; {lead.says}" if lead.cause is Cause.UNKNOWN else says


def _line(row: dict[str, Any]) -> str:
    if row["healthy"]:
        mark = "ALARM" if row["alarm"] else "quiet"
    else:
        wrong = [what for what, is_right in row["right"].items() if not is_right]
        mark = ("right" if not wrong else f"wrong {', '.join(wrong)}") if row["found"] else "MISSED"
    return f"{mark:24} {row['set']}/{row['name']} exit {row['exit_code']} {row['seconds']} s  {row['says']}"


def _sums(rows: Sequence[dict[str, Any]]) -> str:
    broken = [row for row in rows if not row["healthy"]]
    healthy = [row for row in rows if row["healthy"]]
    found = [row for row in broken if row["found"]]
    right = {what: sum(row["right"][what] for row in found) for what in ("rank", "cause", "line")}
    everything = sum(all(row["right"].values()) for row in found)
    alarms = sum(row["alarm"] for row in healthy)
    parts = [f"{len(found)} of {len(broken)} found", *(f"{what} {number}" for what, number in right.items())]
    return f"{', '.join(parts)}, all right {everything}; {alarms} alarms in {len(healthy)} healthy"


if __name__ == "__main__":
    main()
