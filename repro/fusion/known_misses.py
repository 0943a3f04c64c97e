"""Fusions that public issues found missing, each with the pair, the reason and the setting that this torch gives.

    python repro/fusion/known_misses.py

Needs no GPU: code is generated for an H100, and nothing runs (docs/fusion.md). Seen with torch 2.11.0 and 2.13.0:

    vLLM 27699     the residual, the norm and the quantisation between two matmuls stay one kernel on both, also with
                   async TP (torch 2.9 in the issue); what is apart are the matmuls and their collectives
    NeMo 2987      async TP is on and takes nothing: it looks for mm, and the layer calls bmm
    pytorch 161138 4 kernels for 1: each reduction of a whole tensor is split in two stages
    pytorch 142316 2 kernels for 1 in one order of the operands; torch 2.11 alone

Prints the launches of each program, and its largest miss; `--json` for machines. Exit status 1 when a program has one.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCH = "sm_90"
_ASYNC_TP = {"_micro_pipeline_tp": True}


@dataclass(frozen=True)
class Case:
    """A program with settings of Inductor, and the kinds of the launches whose pair is looked at."""

    issue: str
    build: str
    pair: tuple[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    has_symmetric_memory: bool = True


CASES = (
    Case("vLLM 27699", "sequence_parallel", ("extern", "collective")),
    Case("vLLM 27699, async TP", "sequence_parallel", ("extern", "collective"), _ASYNC_TP),
    Case("NeMo 2987", "gathered_bmm", ("collective", "extern"), _ASYNC_TP),
    Case("NeMo 2987, no symmetric memory", "gathered_mm", ("collective", "extern"), _ASYNC_TP, False),
    Case("NeMo 2987, mm", "gathered_mm", ("collective", "extern"), _ASYNC_TP),
    Case("pytorch 161138", "metrics", ("kernel", "kernel")),
    Case("pytorch 161138, cooperative", "metrics", ("kernel", "kernel"), {"triton.cooperative_reductions": True}),
    Case("pytorch 142316", "small_product_first", ("kernel", "kernel")),
    Case("pytorch 142316, limit", "small_product_first", ("kernel", "kernel"), {"realize_reads_threshold": 8}),
    Case("pytorch 142316, different order", "large_product_first", ("kernel", "kernel")),
)


def found(case: Case) -> dict[str, Any]:
    """The launches of the program, and its largest miss of that pair of kinds."""
    import torch
    from torch.distributed._symmetric_memory import _test_mode

    from tpcompile.fusion.manifest_records import Role
    from tpcompile.fusion.targets import record_without_gpu
    from tpcompile.fusion.why_not import missed_fusions

    torch.compiler.reset()
    with ExitStack() as stack:
        if case.has_symmetric_memory:  # as after enable_symm_mem_for_group, which needs GPUs
            stack.enter_context(_test_mode())
        stack.enter_context(torch._inductor.config.patch(case.options))
        manifest = record_without_gpu(f"repro.fusion.missed_programs:{case.build}", nproc=4)
    (graph,) = manifest.graphs
    assert graph.is_aligned, graph.why_not_aligned
    launches = [one for one in graph.launches if one.role is not Role.WAIT]
    missed = []
    for one in missed_fusions(graph, manifest.settings):
        kinds = tuple(str(graph.launches[place].role) for place in one.places)
        if kinds == case.pair:
            missed.append(one.model_dump(mode="json"))
    return {"launches": [" ".join(one.ops) or one.name for one in launches], "missed": missed[:1]}


def main() -> int:
    """Record all of them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    as_json = parser.parse_args().json
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tpcompile.fusion import no_gpu

    no_gpu.pretend(ARCH)  # before torch is imported
    import torch

    rows = {case.issue: found(case) for case in CASES}
    if as_json:
        print(json.dumps(rows))
    else:
        print(f"torch {torch.__version__}, {ARCH}")
        for issue, row in rows.items():
            _show(issue, row)
    return int(any(row["missed"] for row in rows.values()))


def _show(issue: str, row: dict[str, Any]) -> None:
    print(f"\n{issue}: {len(row['launches'])} launches")
    for one in row["missed"]:
        reason = one["reason"]
        print(f"  {one['first']} and {one['second']}\n  {reason['text']}\n  try: {reason['remedy']}")


if __name__ == "__main__":
    sys.exit(main())
