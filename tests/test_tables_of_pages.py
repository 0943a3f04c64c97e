"""Tables, options, outputs and blocks of the pages of the tools: they list what the code has, and nothing else."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.test_references import commands, options
from tpcompile.bench.names import ROLES, VARIANTS
from tpcompile.choices import Profile
from tpcompile.config import BlockConfig
from tpcompile.fastpath import registered
from tpcompile.fastpath.registry import TpSupport
from tpcompile.fusion.bisect import Kind
from tpcompile.fusion.diff import Change
from tpcompile.fusion.reasons import Boundary
from tpcompile.fusion.win import decide as deciding
from tpcompile.fusion.win import mode_records
from tpcompile.fusion.win.decide import decide
from tpcompile.typecheck.spmd import parse_type

ROOT = Path(__file__).resolve().parents[1]


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def cells(text: str, heading: str) -> str:
    """First cells of the table below a heading row's first cell, one a line."""
    rows = text[text.index(f"\n| {heading} |") :].partition("\n\n")[0].strip().splitlines()
    return "\n".join(row.split(" | ")[0].removeprefix("| ") for row in rows[2:])


def not_listed(names: Iterable[str], text: str) -> list[str]:
    """Names that do not stand in the text as whole words."""
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def rules() -> set[str]:
    """Rules of the type check: the names with a dash that the source passes on and that are rules."""
    found = set[str]()
    for path in (ROOT / "tpcompile" / "typecheck").glob("*.py"):
        found |= set(re.findall(r'"([a-z]+(?:-[a-zA-Z]+)+)"', path.read_text()))
    return found - {"norm-inf", "too-small", "too-large"}  # kinds of a value


TABLES = {
    ("verify-win", "reason"): set(mode_records.Cause),
    ("fusion", "boundary"): set(Boundary) - {Boundary.UNKNOWN},
    ("fusion", "class"): set(Change),
    ("profiles", "profile"): set(get_args(Profile)),
    ("bench", "base"): set(ROLES),
    ("bench", "variant"): set(VARIANTS),
    ("fastpath", "`tp=`"): set(TpSupport),
    ("typecheck", "rules"): rules(),
}
"""Page and first cell of a table's heading -> what it must list."""


@pytest.mark.parametrize(("name", "heading"), TABLES)
def test_a_table_lists_what_the_code_has(name: str, heading: str) -> None:
    names = TABLES[name, heading]
    listed = cells(page(name), heading)
    assert not_listed(names, listed) == []
    assert not_listed(["no such name"], listed)
    first = sorted(names)[0]
    assert first in not_listed(names, re.sub(rf"(?<![\w-]){re.escape(first)}(?![\w-])", "", listed))


def test_the_fast_paths_of_the_page_are_those_that_ship() -> None:
    importlib.import_module("tpcompile.fastpath.kernels.all")
    listed = set(re.findall(r"`(\w+)`", cells(page("fastpath"), "fast path")))
    shipped = {name for name, path in registered().items() if path.launcher.__module__.startswith("tpcompile.")}
    assert listed == shipped


def test_the_kinds_that_bisect_takes_out_are_those_of_its_output() -> None:
    text = page("fusion")
    assert not_listed(Kind, text[text.index("as it is: 3 launches") :].partition("```")[0]) == []


def test_the_fields_of_the_block_on_the_page_exist() -> None:
    named = re.findall(r"`(\w+)", cells(page("tp-maths"), "`BlockArgs`"))
    others = {"mask", "tp"}
    assert [name for name in named if name not in {*BlockConfig.model_fields, *others}] == []


def test_the_types_of_the_page_can_be_parsed() -> None:
    for text in re.findall(r"`([^`]+)`", cells(page("typecheck"), "type")):
        parse_type(text.replace("(dim)", "(1)"), ndim=2, grad=text != "C")


def test_the_output_of_verify_win_is_what_it_prints_of_the_report() -> None:
    modes = json.loads((ROOT / "results" / "h100x1-modes.json").read_text())["programs"]["pointwise"]["modes"]
    found = [mode_records.Measured.model_validate(one) for one in modes]
    printed = "\n".join(line.plain for line in deciding.lines(found, decide(found)))
    assert f"```text\n{printed}\n```" in page("verify-win")
    columns = cells(page("verify-win"), "column")
    assert not_listed(["speed-up", "kernels", "regions", "error", "first s", "cached", "cold"], columns) == []


FIGURES = (
    [("h100x2-bench_wan14b_8-7", 0), ("h100x2-bench_wan14b_256-4", 0), ("h100x2-bench_wan14b-6", 0)],
    [("h200x2-bench_wan14b_8", 0), ("h200x2-bench_wan14b", 1), ("h200x2-bench_wan14b", 2)],
)
"""Of each table of docs/bench.md, the report and the number of its measurement, of each column."""


def wrong_figures(text: str) -> list[str]:
    """Rows of the figures that are not the medians of the committed rounds."""
    wrong = []
    for number, columns in enumerate(FIGURES):
        for one, exact in medians_of(columns).items():
            rows = re.findall(rf"^\| {re.escape(one)}[^|]*\| (.*) \|$", text, re.M)
            assert len(rows) == len(FIGURES)
            said = rows[number].split(" | ")
            shown = [f"{ms:.{len(text.partition('.')[2])}f}" for ms, text in zip(exact, said, strict=True)]
            wrong += [one] if shown != said else []
    return wrong


def medians_of(columns: list[tuple[str, int]]) -> dict[str, list[float]]:
    """Program -> milliseconds by column."""
    found: dict[str, list[float]] = {}
    for name, number in columns:
        rows = json.loads((ROOT / "results" / f"{name}.json").read_text())["measured"][number]["rows"]
        medians = {row["name"].rpartition("/peers.py:")[2]: statistics.median(row["rounds_ms"]) for row in rows}
        for one in ("A", "hooks:graphed", "compute:graphed"):
            found.setdefault(one, []).append(medians[one])
        best = min(ms for one, ms in medians.items() if one.startswith("C"))
        found.setdefault("the best form of C", []).append(best)
    return found


def test_the_figures_of_the_benchmark_are_those_of_its_reports() -> None:
    text = page("bench")
    assert wrong_figures(text) == []
    assert wrong_figures(text.replace("| 0.741 |", "| 0.714 |")) == ["the best form of C"]
    assert wrong_figures(text.replace("| 0.585 |", "| 0.558 |")) == ["hooks:graphed"]


COMMANDS = {
    "dryrun": "how-to/dry-run",
    "verify-win": "verify-win", "typecheck": "typecheck", "certify": "fastpath", "bench": "bench",
    "tune": "profiles",
    "fusion record": "fusion", "fusion show": "fusion", "fusion explain": "fusion", "fusion diff": "fusion",
    "fusion bisect": "fusion", "fusion baseline": "fusion", "fusion check": "fusion", "fusion plot": "fusion",
}  # fmt: skip
"""Command -> its page."""


def undocumented(command: str, text: str) -> list[str]:
    """Options of a command that its page names in neither form, long or short, with or without `no-`."""
    lacking = []
    for option in commands()[command].params:  # type: ignore[attr-defined]
        spelled = [one for one in (*option.opts, *option.secondary_opts) if one.startswith("-")]
        if spelled and "--help" not in spelled and len(not_listed(spelled, text)) == len(spelled):
            lacking.append(spelled[0])
    return lacking


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_on_its_page(command: str) -> None:
    assert undocumented(command, page(COMMANDS[command])) == []


def test_an_option_that_is_on_no_page_is_found() -> None:
    assert undocumented("verify-win", page("verify-win").replace("--timeout-s", "")) == ["--timeout-s"]
    assert "--rounds" in options(commands()["bench"])


def calls(block: str) -> list[tuple[str, set[str]]]:
    """(dotted name, keywords) of every call of a block."""
    return [
        (ast.unparse(node.func), {keyword.arg for keyword in node.keywords if keyword.arg})
        for node in ast.walk(ast.parse(textwrap.dedent(block)))
        if isinstance(node, ast.Call)
    ]


def unknown_keywords(block: str, known: dict[str, Callable[..., Any]]) -> list[str]:
    """Keywords that a known function of the block does not take, and imports of it that do not exist."""
    found = []
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            found += [one.name for one in node.names if not hasattr(module, one.name)]
    for name, keywords in calls(block):
        if name in known:
            found += sorted(keywords - set(inspect.signature(known[name]).parameters))
    return found


def needs_gpus() -> dict[str, dict[str, Callable[..., Any]]]:
    """A name in a block that no test can run without GPUs -> what the block calls."""
    import tpcompile
    from tpcompile.fastpath.kernels.all_reduce_norm import all_reduce_add_rms_norm
    from tpcompile.fastpath.kernels.exchange_memory import Exchange
    from tpcompile.nn.causal_lm import CausalLM

    return {
        "Exchange.of_group": {
            "Exchange.of_group": Exchange.of_group,
            "all_reduce_add_rms_norm": all_reduce_add_rms_norm,
            "exchange.check": Exchange.check,
        },
        "model.next_tokens": {
            "tpcompile.run": tpcompile.run,
            "model.new_caches": CausalLM.new_caches,
            "model.generate": CausalLM.generate,
        },
    }


@pytest.mark.parametrize(("name", "block_name"), [("fastpath", "Exchange.of_group"), ("profiles", "model.next_tokens")])
def test_blocks_that_need_gpus_call_what_exists(name: str, block_name: str) -> None:
    known = needs_gpus()[block_name]
    (block,) = [text for text in re.findall(r"^```python\n(.*?)^```$", page(name), re.M | re.S) if block_name in text]
    assert {called for called, _ in calls(block)} >= set(known)
    assert unknown_keywords(block, known) == []
    renamed = re.sub(r"(num_rows|batch)=", "nope=", block)
    assert unknown_keywords(renamed, known) == ["nope"]
    assert unknown_keywords("from tpcompile import nothing\n", known) == ["nothing"]
