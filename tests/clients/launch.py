"""A client, a fault and a route -> one run under torchrun, and what it left."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.clients.case import Client
from tests.clients.watched import ROUTE, RUN_DIR, UNEDITED
from tpcompile.evidence.records import Verdict
from tpcompile.launch import torchrun
from tpcompile.process_tree import run_tree

ROOT = Path(__file__).resolve().parents[2]
_GRACE_S = 3.0
_FEW_THREADS = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    timed_out: bool
    verdict: Verdict | None
    wall_s: float
    text: str
    """All that the ranks and torchrun printed."""


def run(client: Client, fault: str, route: str, folder: Path, *, limit_s: float) -> Outcome:
    """Run a client, with a fault or "" for none; no process of it is left when this returns."""
    run_dir = folder / "run"
    variables = {
        **os.environ, **_FEW_THREADS, **_OFFLINE, ROUTE: route, RUN_DIR: str(run_dir), "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }  # fmt: skip
    arguments = [fault] if fault else []
    command = torchrun(client.num_ranks, [str(client.program), *arguments])
    if route == UNEDITED:
        command = [sys.executable, "-m", "tpcompile", "run", "--run-dir", str(run_dir), "--", *command]
    log = folder / "log.txt"
    began_s = time.monotonic()
    with log.open("w") as out:
        ended = run_tree(["sh", "-c", 'exec "$0" "$@" 2>&1', *command], environ=variables, timeout_s=limit_s,
                         grace_s=_GRACE_S, stdout=out)  # fmt: skip
    wall_s = time.monotonic() - began_s
    written = run_dir / "verdict.json"
    return Outcome(
        exit_code=ended.exit_code,
        timed_out=ended.timed_out,
        verdict=Verdict.model_validate_json(written.read_text()) if written.exists() else None,
        wall_s=wall_s,
        text=log.read_text(errors="replace"),
    )
