#!/usr/bin/env python
"""tlparse's own test inputs -> the expected and the actual verdict of `tpcompile diagnose` on each.

    scripts/check_tlparse_inputs.py FOLDER     # the tests/ folder of a checkout of meta-pytorch/tlparse

A folder of logs is judged as one job; a single log is judged as the log of two ranks, which must agree. Exit code 0
when every verdict is as expected.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tpcompile.errors import TpCompileError
from tpcompile.evidence.logs.diagnose import diagnose

LOG = "dedicated_log_torch_trace_rank_{}.log"


@dataclass(frozen=True)
class Expected:
    """The expected verdict on one input, and why."""

    name: str
    exit_code: int
    says: tuple[str, ...] = ()
    """Texts that the verdict or its findings must contain."""
    why: str = ""


JOBS = (
    Expected("inputs/multi_rank_schedule", 1, ("Inductor scheduled", "reduce_scatter"), "rank 1 schedules none"),
    Expected("graph_exec_order_tests", 1, ("ran in a different order",), "0/1, 0/0 against 0/0, 0/1"),
    Expected("inputs/multi_rank_logs", 1, ("compiled on rank",), "logs of four programs"),
    Expected("inputs/multi_rank_runtime", 1, ("rank 0-4 against 5-6",), "ranks 5 and 6 run a different program"),
    Expected("inputs/multi_rank_messy_input", 0, ("2 ranks agree",), "other files beside two equal logs"),
    Expected("inputs/collectives_parity", 2, ("only that of rank 0",), "one rank"),
)
NO_FRAME = "an export or ahead-of-time compile: no frame of torch.compile"
SINGLE = {
    "artifacts.log": Expected("", 0),
    "autotune_with_compile_id.log": Expected("", 0),
    "cache_hit_miss.log": Expected("", 0),
    "chromium_events.log": Expected("", 5, ("failed with BackendCompilerFailed",), "its only compile failed"),
    "comp_failure.log": Expected("", 5, ("failed with BackendCompilerFailed",), "its only compile failed"),
    "comp_metrics.log": Expected("", 0),
    "export.log": Expected("", 5, (), NO_FRAME),
    "export_guard_added.log": Expected("", 5, (), NO_FRAME),
    "inductor_provenance_aot_cuda_log.txt": Expected("", 5, (), NO_FRAME),
    "inductor_provenance_aot_debug_handle_log.txt": Expected("", 5, (), NO_FRAME),
    "inductor_provenance_aot_log.txt": Expected("", 5, (), NO_FRAME),
    "inductor_provenance_aot_log_old.txt": Expected("", 5, (), NO_FRAME),
    "inductor_provenance_extended_log.txt": Expected("", 5, (), NO_FRAME),
    "links.log": Expected("", 0),
    "simple.log": Expected("", 0),
    "simple_corrupted_json.log": Expected("", 0, (), "the damaged payload is of an event that is not evidence"),
}


def said(folder: Path) -> tuple[int, str]:
    """Exit code and all texts of the verdict."""
    try:
        verdict = diagnose([folder])
    except TpCompileError as error:
        return int(error.exit_code), str(error)
    texts = [verdict.summary, *(c.observed for c in verdict.checks), *(d.title for d in verdict.divergences)]
    return verdict.exit_code, "\n".join(texts)


def of_single(path: Path) -> tuple[int, str]:
    """The same log on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for rank in (0, 1):
            shutil.copy(path, Path(folder, LOG.format(rank)))
        return said(Path(folder))


def main(root: Path) -> int:
    """Check every input and print a row for each."""
    table = Table("input", "expected", "said", "")
    singles = sorted(p for p in (root / "inputs").iterdir() if p.suffix in (".log", ".txt") and p.is_file())
    rows = [(expected, said(root / expected.name)) for expected in JOBS]
    for path in singles:
        expected = SINGLE.get(path.name, Expected("", 0))
        rows.append((Expected(f"inputs/{path.name}", expected.exit_code, expected.says, expected.why), of_single(path)))
    num_wrong = 0
    for expected, (code, text) in rows:
        is_right = code == expected.exit_code and all(part in text for part in expected.says)
        num_wrong += not is_right
        wanted = f"exit {expected.exit_code} {', '.join(expected.says)} {expected.why}"
        table.add_row(
            expected.name, wanted, f"exit {code}: {text.splitlines()[0][:150]}", "ok" if is_right else "WRONG"
        )
    Console(width=200).print(table)
    print(f"{len(rows) - num_wrong} of {len(rows)} as expected")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
