"""results/*.json -> docs/results.md: `python scripts/results_page.py > docs/results.md`; a test compares them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
sys.path.insert(0, str(ROOT))

from tests.clients.table import as_page  # noqa: E402
from tests.clients.table import read as rows_of  # noqa: E402

_HEAD = """\
# Results

Written by `scripts/results_page.py` from `results/*.json`. Each table names its file; the last table has the command,
the machine and the versions of every file. Drawn programs and those of other engineers were not used in
development, and the figures are those of their first run. "Right" means that the finding agrees with what was
written down before it.
"""
Row = Sequence[object]


def page(results: Path = RESULTS) -> str:
    """The page."""
    read = {path.name: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    parts = [
        _HEAD,
        "## Programs written from the documentation alone\n",
        *_docs_only(read["docs_only_programs.json"]),
        *_foreign(read["foreign_programs.json"]),
        "## Drawn programs, held-out seeds\n",
        *_drawn(read),
        "## Planted faults\n",
        *_planted(read),
        "## Other tools\n",
        *_other_tools(read["faults_columns_cpu.json"]),
        *_types(read["spmd_types_cpu.json"]),
        "## Healthy programs\n",
        *_healthy(read),
        "## Frameworks\n",
        *_clients(read),
        *_adapters(read),
        "## Time and cost\n",
        *_sentinel_cost(read),
        *_flow_cost(read),
        *_scale(read),
        *_dry_runs(read["dryrun_cpu.json"]),
        *_gate(read),
        *_search(read["wrong_numbers_cpu.json"]),
        *_single(read),
        "## All files\n",
        _table(("file", "command", "machine", "versions, commit"), map(_origin, read, read.values())),
    ]
    return "\n".join(parts)


def _table(heading: Row, rows: Iterable[Row]) -> str:
    lines = [heading, ["---" for _ in heading], *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")


def _docs_only(report: Mapping[str, Any]) -> Iterator[str]:
    about = report["about"]
    yield f"`results/docs_only_programs.json`: {about['what']}. {about['lines']}.\n"
    heading = (
        "set",
        "commit",
        "broken",
        "found",
        "rank",
        "cause",
        "line",
        "all right",
        "without executed lines",
        "alarms",
    )
    yield _table(heading, (_docs_only_row(name, rows, about["commit"][name]) for name, rows in report["sets"].items()))
    newest = list(about["commit"])[-1]
    yield f"The newest set, {newest}: {about[newest]}\n"


def _docs_only_row(name: str, rows: Sequence[Mapping[str, Any]], commit: str) -> Row:
    broken = [row for row in rows if not row["healthy"]]
    healthy = [row for row in rows if row["healthy"]]
    found = [row for row in broken if row["found"]]
    rights = [sum(_is_right(row, what) for row in found) for what in ("rank", "cause", "line")]
    alarms = f"{sum(row['alarm'] for row in healthy)} of {len(healthy)}" if healthy else None
    without = [row for row in broken if "without_lines" in row]
    bare = sum(_all_right(row["without_lines"]) for row in without) if without else None
    return (
        name,
        commit,
        len(broken),
        len(found),
        *rights,
        sum(_all_right(row.get("right")) for row in found),
        bare,
        alarms,
    )


def _is_right(row: Mapping[str, Any], what: str) -> bool:
    return bool((row.get("right") or {}).get(what))


def _all_right(right: Mapping[str, Any] | None) -> bool:
    return bool(right) and all(right.get(what) for what in ("rank", "cause", "line"))


def _foreign(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"Earlier, `results/foreign_programs.json`: {report['about']['what']}.\n"
    counts = ("broken", "found", "rank right", "cause right", "line right", "all right", "healthy", "alarms")
    rows = ((one["set"], one["commit"], one["route"], *(one.get(count) for count in counts)) for one in report["sets"])
    yield _table(("set", "commit", "route", *counts), rows)


def _drawn(read: Mapping[str, Any]) -> Iterator[str]:
    rows = [
        (name, _commit(report), route, *_outcomes(counts))
        for name, report in read.items()
        if name.startswith(("generated_", "h200x2-generated_"))
        for route, counts in _routes(report).items()
    ]
    yield _table(("file", "commit", "route", "programs", "all right", "other outcomes", "median s", "worst s"), rows)


def _routes(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Route -> counts of the broken programs."""
    summary = report["summary"].get("faults", report["summary"])
    is_flat = all(isinstance(count, int) for count in summary.values())
    return {"sentinel": {"cases": sum(summary.values()), "outcomes": summary}} if is_flat else summary


def _outcomes(counts: Mapping[str, Any]) -> Row:
    outcomes = dict(counts["outcomes"])
    right = outcomes.pop("named", 0)
    others = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
    return (counts["cases"], right, others, counts.get("median_s"), counts.get("worst_s"))


def _planted(read: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for name, report in read.items():
        if name.startswith(("faults_cpu", "h200x2-faults")):
            outcomes = Counter(one["outcome"] for one in report["results"])
            rows.append((name, *(outcomes.pop(kind, 0) for kind in ("named", "green")), _counts(outcomes)))
    yield _table(("file", "named", "healthy, green", "other outcomes"), rows)


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))


def _other_tools(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Six of the planted cases, `results/faults_columns_cpu.json`; hang: nothing was reported and the job had "
        "not ended after 40 s, which includes compile time on two busy cores:\n"
    )
    tools = ("tlparse", "detail", "spmd_check")
    rows = ((one["name"], one["outcome"], *(one["columns"].get(tool) for tool in tools)) for one in report["results"])
    yield _table(("case", "tpcompile", *tools), rows)


def _types(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "`tpcompile typecheck` and spmd_types on modules of tests/typecheck, `results/spmd_types_cpu.json`; in the "
        "first run the set `third` was new to both, and our rules had been extended on the other two:\n"
    )
    counts = ("broken", "found", "broken, stopped", "correct", "false alarms", "correct, stopped")
    rows = (
        (run, tool, name, *(rates[count] for count in counts))
        for run, one in report["runs"].items()
        for tool, sets in one["rates"].items()
        for name, rates in sets.items()
    )
    yield _table(("run", "tool", "set", *counts), rows)


def _healthy(read: Mapping[str, Any]) -> Iterator[str]:
    found = {name: report for name, report in read.items() if isinstance(report, dict) and "false_alarms" in report}
    runs = {name: report for name, report in found.items() if isinstance(report["false_alarms"], int)}
    rows = ((name, report["runs"], report["false_alarms"]) for name, report in runs.items())
    yield _table(("file", "runs", "alarms"), rows)


def _clients(read: Mapping[str, Any]) -> Iterator[str]:
    counts = ("healthy", "alarms", "faults", "found", "rank right", "cause right", "line right", "all right")
    names = ("clients_cpu.json", "clients_run_cpu-python3.11.json", "clients_run_cpu-python3.12.json")
    yield _table(("file", *counts), ((name, *(read[name]["summary"][count] for count in counts)) for name in names))
    yield f"`results/clients_cpu.json`. {as_page(rows_of(RESULTS / 'clients_cpu.json'))}\n"


def _yes(value: bool | None) -> str | None:
    return None if value is None else ("yes" if value else "no")


def _adapters(read: Mapping[str, Any]) -> Iterator[str]:
    for name in ("adapters_cpu-3.json", "adapters_cpu-inductor.json"):
        report = read[name]
        yield f"`results/{name}`, backend {report['backend']}:\n"
        healthy = {program: row for program, row in report["rows"].items() if "graphs" in row}
        broken = {program: row for program, row in report["rows"].items() if "graphs" not in row}
        counts = ("ranks", "graphs", "graph breaks", "forward error", "gradient error", "exit status")
        yield _table(("program", *counts), ((name, *(row[key] for key in counts)) for name, row in healthy.items()))
        rights = ("found", "named", "line")
        if broken:
            rows = ((name, *(_yes(row[key]) for key in rights), row["wall_s"]) for name, row in broken.items())
            yield _table(("program with a fault", *rights, "s"), rows)


def _sentinel_cost(read: Mapping[str, Any]) -> Iterator[str]:
    yield "A call of a compiled function under the sentinel, in steady state:\n"
    rows = []
    for name, report in read.items():
        if "bench_sentinel" in name:
            for one in report if isinstance(report, list) else [report]:
                rows.append((name, one["empty"]["extra_us"], 100 * one["share_of_1_ms"], one["step"]["ratio"]))
    yield _table(("file", "us a call", "% of a step of 1 ms", "ratio of a step of 2 ms"), rows)
    told = read["h200x4-divergence.json"]
    yield "One rank recompiles alone, 4 H200 (`results/h200x4-divergence.json`):\n"
    yield _table(
        ("", "ended by itself", "fault to verdict, s", "fault to end, s"),
        (
            (
                name,
                _yes(told[name]["ended_by_itself"]),
                told[name].get("fault_to_verdict_s"),
                told[name]["fault_to_end_s"],
            )
            for name in ("sentinel", "plain")
        ),
    )


def _flow_cost(read: Mapping[str, Any]) -> Iterator[str]:
    yield "A step with recorded lines, as a multiple of one without:\n"
    rows = []
    for name, report in read.items():
        if name.startswith("bench_flow"):
            for loop, timed in report["loops"].items():
                ((what, one),) = ((key, one) for key, one in timed.items() if key != "off")
                quartiles = " to ".join(f"{value:.3f}" for value in one["quartiles"])
                ratio = f"{one['ratio']:.3f} ({quartiles})"
                rows.append((name, loop, what, timed["off"]["cpu_ms"], one["events_per_step"], ratio))
    yield _table(("file", "loop", "recorded", "ms a step without", "events a step", "ratio (quartiles)"), rows)


def _scale(read: Mapping[str, Any]) -> Iterator[str]:
    yield "Ranks as threads over one TCPStore, each with a digest of a small record; connecting is not timed:\n"
    keys = ("ranks", "case", "wall_s", "store_cpu_s", "judge_cpu_s", "judge_mb", "questions", "operations", "keys_left")
    rows = []
    for name in ("scale_before_cpu.json", "scale_cpu.json"):
        for one in read[name]["rows"]:
            rows.append((name, *(one[key] for key in keys), 1e-6 * (one["bytes_set"] + one["bytes_got"])))
    yield _table(("file", *keys, "MB over the store"), rows)


def _dry_runs(report: Mapping[str, Any]) -> Iterator[str]:
    yield "Dry runs of a Llama in a program that reads its rank (`results/dryrun_cpu.json`):\n"
    keys = ("mesh", "size", "layers", "fault", "odd", "cpu_s", "wall_s", "load", "peak_pss_mb")
    rows = []
    for row in report["rows"]:
        named = f"ranks {row['ranks']} {row['line']}" if row["ranks"] else ""
        rows.append((*(row[key] for key in keys), row["exit_code"], named))
    yield _table((*keys, "exit code", "named"), rows)


def _search(report: Mapping[str, Any]) -> Iterator[str]:
    yield "Check and search of wrong numbers on a Llama (`results/wrong_numbers_cpu.json`), rank 0 of 2:\n"
    heading = ("layers", "check, CPU s", "search, CPU s", "multiple", "peak MiB, check", "with the search")
    rows = [
        (one["layers"], check["cpu_s"], search["cpu_s"], one["times_check"], check["peak_mib"], search["peak_mib"])
        for one in report["rows"]
        for check, search in [(one["check"], one["search"])]
    ]
    yield _table(heading, rows)


def _gate(read: Mapping[str, Any]) -> Iterator[str]:
    cost = read["gate_cost_cpu.json"]
    yield "The gate's wall time as a multiple of a bare script's (`results/gate_cost_cpu.json`):\n"
    yield _table(
        ("cache", "median", "range"), ((name, one["ratio_median"], one["ratio_range"]) for name, one in cost.items())
    )
    yield "Gates on 4 H200:\n"
    rows = []
    for name in ("h200x4-torch2.11.json", "h200x4-maths-torch2.11.json"):
        for gate, run in read[name]["gates"].items():
            rows.append((name, gate, run["verdict"]["exit_code"], run["verdict"]["summary"], run["wall_s"]))
    yield _table(("file", "gate", "exit code", "summary", "wall s"), rows)
    yield "Modes A, B and C, times as ratios to C (`results/h200x2-bench_modes.json`):\n"
    rows = [(run["preset"], run.get("train"), *_modes(run)) for run in read["h200x2-bench_modes.json"]["runs"]]
    yield _table(("preset", "train", "eager", "A", "B", "C, ms"), rows)


def _modes(run: Mapping[str, Any]) -> Row:
    return (*(run["ratio_to_C"].get(mode) for mode in ("eager", "A", "B")), run["median_ms"]["C"])


def _single(read: Mapping[str, Any]) -> Iterator[str]:
    first = read["first_verdict_cpu.json"]
    yield (
        "From the end of `pip install` to the first verdict on a small Llama of transformers: "
        f"{first['first verdict_s']:.0f} s (`results/first_verdict_cpu.json`).\n"
    )
    keys = ("what", "value", "command", "machine", "torch", "python", "commit")
    for name, report in read.items():
        if isinstance(report, dict) and "figures" in report:
            yield f"`results/{name}`, {report['about']['what']}:\n"
            yield _table(keys, ([one.get(key) for key in keys] for one in report["figures"]))


def _origin(name: str, report: Any) -> Row:
    """Where a report says that it comes from."""
    head = report[0] if isinstance(report, list) else report
    about = {**head, **_dict(head.get("machine")), **_dict(head.get("made_with")), **_dict(head.get("about"))}
    about |= _dict(next((one for one in _dict(head).values() if isinstance(one, dict) and "command" in one), None))
    commands = about.get("commands") or about.get("command") or ""
    command = "; ".join(commands) if isinstance(commands, list) else str(commands)
    machine = about.get("machine", about.get("gpu", ""))
    versions = {key: about.get(key) for key in ("torch", "python", "transformers")}
    shown = [f"{key} {value}" for key, value in versions.items() if isinstance(value, str)]
    commit = _commit(report)
    return (
        name,
        f"`{command}`" if command else "",
        _words(machine),
        ", ".join([*shown, *([commit] if commit else [])]),
    )


def _words(value: object) -> str:
    """A machine as words."""
    machine = _dict(value)
    if not machine:
        return str(value)
    gpus = machine.get("gpus")
    gpu = f"{len(gpus)} {gpus[0]}" if isinstance(gpus, list) and gpus else machine.get("gpu")
    known = (machine.get("arch"), machine.get("host"), gpu)
    return ", ".join(str(one) for one in known if one)


def _commit(report: Any) -> str:
    head = report[0] if isinstance(report, list) else report
    commit = head.get("commit", "")
    return ", ".join(sorted(set(commit.values()))) if isinstance(commit, dict) else str(commit)


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    print(page(), end="")
