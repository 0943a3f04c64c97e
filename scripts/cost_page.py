"""results/*.json -> docs/cost.md: `python scripts/cost_page.py > docs/cost.md`; a test compares them."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"

_HEAD = """\
# What does tpcompile itself cost?

Written by `scripts/cost_page.py` from the reports in `results/`; the last column has the script in `scripts/` that
measures a row on your machine. Ratios are medians of interleaved rounds in one run; one below 1 is noise. Commands,
machines and versions are in [Results](results.md#all-files).
"""


def page(results: Path = RESULTS) -> str:
    """The page."""
    read = {path.stem: json.loads(path.read_text()) for path in results.glob("*.json")}
    return "\n".join([_HEAD, *_table("While a job runs", _running(read)), *_table("Before it runs", _before(read)),
                      *_table("Afterwards", _after(read))])  # fmt: skip


def _table(heading: str, rows: Iterator[tuple[str, str, str]]) -> Iterator[str]:
    yield f"## {heading}\n"
    yield "| what | cost | report, script |"
    yield "| --- | --- | --- |"
    for what, cost, source in rows:
        yield f"| {what} | {cost} | {source} |"
    yield ""


def _running(read: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    sentinel = read["bench_sentinel_cpu"]
    newest = [one for one in read["h200x2-bench_sentinel-7"] if one["records_lines"]]
    extra = [f"{one['empty']['extra_us']:.1f}" for one in newest]
    ratios = [f"{one['step']['ratio']:.2f}" for one in newest]
    yield (
        f"Sentinel, a call of a compiled region, Python {sentinel['made_with']['python']}",
        f"{sentinel['empty']['extra_us']:.1f} us; a step of 2 ms {sentinel['step']['ratio']:.3f} times as long",
        _from("bench_sentinel_cpu", "bench_sentinel.py"),
    )
    with_lines = read["bench_sentinel_cpu-python3.12"]
    yield (
        "the same, Python 3.12, which records executed lines",
        f"{with_lines['empty']['extra_us']:.1f} us in a loop of five recorded lines and values, "
        f"{with_lines['empty_without_lines']['extra_us']:.1f} us with `flow=False`; "
        f"a step of 2 ms {with_lines['step']['ratio']:.3f}",
        _from("bench_sentinel_cpu-python3.12", "bench_sentinel.py"),
    )
    yield (
        "the same, 2 H200, three runs",
        f"{', '.join(extra)} us; a step of 1 ms {', '.join(ratios)}",
        _from("h200x2-bench_sentinel-7", "bench_sentinel.py"),
    )
    loops = {name: loop["user's file"]["ratio"] for name, loop in read["bench_flow_cpu"]["loops"].items()}
    yield (
        "executed lines of your files, loops of a small transformers model, CPU time of a step",
        "; ".join(f"{name} {ratio:.3f}" for name, ratio in loops.items()),
        _from("bench_flow_cpu", "bench_flow.py"),
    )
    agree = read["h200x2-agree"]
    yield (
        f"`sentinel.agree` every {agree['every']} steps, 2 H200",
        f"{agree['time']['ratio']:.3f} of a step of {agree['time']['off_ms']:.0f} ms, "
        f"{agree['synchronisations']['agree']} synchronisations",
        _from("h200x2-agree", "bench_agree.py"),
    )
    ratio = read["bench_run_cpu"]["ratios"]
    yield (
        "`tpcompile run`, a job of 300 short steps from start to end",
        f"{statistics.median(ratio['watched, job']):.2f}",
        _from("bench_run_cpu", "bench_run.py"),
    )
    wrappers = [one["ratio_to_twin"] for one in read["bench_wrappers_cpu"]["wrappers"].values()]
    yield (
        "a wrapper of a collective in eager mode, beside torch's functional collective",
        f"{min(wrappers):.2f} to {max(wrappers):.2f}",
        _from("bench_wrappers_cpu", "bench_wrappers.py"),
    )


def _before(read: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    imports = read["import_cpu"]["imports"]
    dynamo_s = imports["torch._dynamo"]["cpu_s"]
    for name in ("tpcompile", "tpcompile.collectives", "tpcompile.sentinel"):
        base, base_s = ("torch", imports["torch"]["cpu_s"]) if name == "tpcompile" else ("torch._dynamo", dynamo_s)
        cpu_s = imports[name]["cpu_s"]
        yield (
            f"`import {name}`",
            f"{cpu_s - base_s:.2f} CPU s beyond `{base}` ({base_s:.2f})",
            _from("import_cpu", "bench_import.py"),
        )
    gate = read["gate_cost_cpu"]
    yield (
        "the gate beside a script that compiles and runs the same block",
        f"{gate['warm']['ratio_median']:.2f} with warm caches, {gate['cold']['ratio_median']:.2f} with cold ones",
        _from("gate_cost_cpu", "bench_gate.py"),
    )
    dry = [row for row in read["dryrun_cpu"]["rows"] if (row["size"], row["layers"], row["fault"]) == ("8b", 2, "")]
    for row in {row["world_size"]: row for row in dry}.values():
        yield (
            f"`tpcompile dryrun`, {row['world_size']:,} ranks of two layers of a Llama-8B",
            f"{row['cpu_s']:.0f} CPU s, {row['wall_s']:.0f} s on {row['cores']} cores, {row['peak_pss_mb']} MB",
            _from("dryrun_cpu", "bench_dryrun.py"),
        )
    layers = read["bench_fusion_cpu"]["layers"]
    yield (
        "recording a fusion manifest, beside a compile without",
        ", ".join(f"{row['ratio']:.2f}" for row in layers.values()) + f" at {', '.join(layers)} layers",
        _from("bench_fusion_cpu", "bench_fusion.py"),
    )
    searches = [row["times_check"] for row in read["wrong_numbers_cpu"]["rows"]]
    yield (
        "the search for wrong numbers, where a check is red",
        f"{min(searches):.1f} to {max(searches):.1f} times the check",
        _from("wrong_numbers_cpu", "bench_wrong_numbers.py"),
    )
    equal = max((row for row in read["scale_cpu"]["rows"] if row["case"] == "equal"), key=lambda row: int(row["ranks"]))
    yield (
        f"the agreement of {equal['ranks']:,} equal ranks through the store",
        f"{equal['wall_s']:.0f} s, {equal['judge_cpu_s']:.1f} CPU s of the judge",
        _from("scale_cpu", "bench_scale.py"),
    )


def _after(read: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    (diagnose,) = (one for one in read["single_figures"]["figures"] if one["what"].startswith("`tpcompile diagnose`"))
    yield (diagnose["what"], diagnose["value"], _from("single_figures", "make_big_logs.py"))
    for row in read["bench_report_cpu"]["rows"]:
        yield (
            f"the page of a run of {row['ranks']:,} ranks, {row['run_bytes'] / 1e6:.0f} MB of records",
            f"{row['cpu_s']:.1f} CPU s, {row['largest_process_kib'] / 1024:.0f} MiB",
            _from("bench_report_cpu", "bench_report.py"),
        )


def _from(report: str, script: str) -> str:
    return f"`{report}.json`, `{script}`"


if __name__ == "__main__":
    sys.stdout.write(page())
