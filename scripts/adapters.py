"""All adapters and all faults on gloo ranks -> the verdict of tpcompile on each, as a table and as JSON.

python scripts/adapters.py [--only TEXT] [--healthy] [--backend inductor] [--logs FOLDER] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from importlib import metadata, util
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.adapters.faults import FAULTS, Fault
from tests.adapters.programs import ADAPTERS, Adapter, Outcome, run_adapter, run_edited

_PLACES = re.compile(r"/\S*/site-packages/|/tmp/\w+/")
"""Prefixes of paths that depend on this machine."""


def adapter_row(adapter: Adapter, outcome: Outcome) -> dict[str, Any]:
    """Verdict, checks and errors of a healthy program."""
    verdicts = [line for line in outcome.text.splitlines() if line.startswith(("PASS", "FAIL"))]
    errors = outcome.errors or (None, None)
    return {
        "ranks": adapter.nproc,
        "exit status": outcome.returncode,
        "verdict": verdicts[-1] if verdicts else "none",
        "graphs": outcome.number(r"compiled: (\d+) graph"),
        "graph breaks": outcome.number(r"graph breaks: (\d+)"),
        "forward error": errors[0],
        "gradient error": errors[1],
        "wall_s": round(outcome.wall_s, 1),
    }


def fault_row(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    """Found, named, line; and the last lines of the verdict."""
    verdict = [_PLACES.sub("", line.strip()) for line in outcome.text.splitlines() if line.startswith(("FAIL", "PASS"))]
    return {
        **fault.judge(outcome),
        "exit status": outcome.returncode,
        "says": verdict[-1:],
        "lines printed": outcome.text.count("\n"),
        "wall_s": round(outcome.wall_s, 1),
    }


def versions() -> dict[str, str]:
    """Versions of the packages under test."""
    found = {name: metadata.version(name) for name in ("torch", "transformers", "diffusers") if util.find_spec(name)}
    return {**found, "python": platform.python_version(), "machine": f"{platform.machine()}, {os.cpu_count()} cores"}


class Rows:
    """Results so far, printed and written after each run; rows of an earlier call stay in the file."""

    def __init__(self, out: Path | None, logs: Path | None, facts: dict[str, str]) -> None:
        self._out, self._logs, self._facts = out, logs, facts
        earlier = json.loads(out.read_text()) if out and out.exists() else {}
        self._rows: dict[str, Any] = earlier.get("rows", {})
        self._commands = list(dict.fromkeys([*earlier.get("commands", []), " ".join(["python", *sys.argv])]))

    def note(self, name: str, row: dict[str, Any], outcome: Outcome) -> None:
        """Keep a row."""
        self._rows[name] = row
        print(name, row, flush=True)
        if self._logs:
            self._logs.mkdir(parents=True, exist_ok=True)
            (self._logs / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}.txt").write_text(outcome.text)
        if self._out:
            self._out.write_text(
                json.dumps({"commands": self._commands, **self._facts, "rows": self._rows}, indent=1) + "\n"
            )


def main() -> None:
    """Run, print a line for each, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of an adapter or of STYLE: FAULT")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--healthy", action="store_true", help="the programs as they are, no faults")
    parser.add_argument("--logs", type=Path, help="folder for what each run printed")
    parser.add_argument("--out", type=Path, help="rows of this call are written into it, over those of earlier calls")
    args = parser.parse_args()
    rows = Rows(args.out, args.logs, {"backend": args.backend, **versions()})
    for name, adapter in ADAPTERS.items():
        if args.only in name and not _is_missing(adapter):
            with TemporaryDirectory() as folder:
                outcome = run_adapter(adapter, Path(folder), backend=args.backend)
            rows.note(name, adapter_row(adapter, outcome), outcome)
    for fault in () if args.healthy else FAULTS:
        name = f"{fault.style}: {fault.name}"
        if args.only in name and not _is_missing(fault.adapter):
            with TemporaryDirectory() as folder:
                outcome = run_edited(fault.adapter, fault.edits, Path(folder), backend=args.backend)
            rows.note(name, fault_row(fault, outcome), outcome)


def _is_missing(adapter: Adapter) -> bool:
    return bool(adapter.needs) and util.find_spec(adapter.needs) is None


if __name__ == "__main__":
    main()
