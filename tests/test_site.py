"""The site: pages made from code and from results/ say what these say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tpcompile
from tests.test_references import commands, options
from tpcompile.evidence.records.causes import Cause

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts" / "docs"


def made_by(script: str) -> str:
    """What a script prints that runs when the site is built."""
    command = [sys.executable, str(SCRIPTS / script)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def left_out(page: str) -> list[str]:
    """Commands and options that are not on the page of the commands."""
    sections = dict(re.findall(r"^#+ tpcompile ([^\n]*)\n\n```text\n(.*?)^```$", page, re.M | re.S))
    lacking = []
    for name, command in commands().items():
        own = options(command) if not getattr(command, "commands", None) else {"--help"}
        flags = sorted(one for one in own - {"-h"} if one.startswith("-"))
        lacking += [f"{name} {one}" for one in flags if one not in sections.get(name, "")]
    return lacking


@pytest.mark.slow
def test_the_page_of_the_commands_has_every_command_with_every_option_and_is_made_without_torch() -> None:
    page = made_by("cli_page.py")
    assert left_out(page) == []
    assert left_out(page.replace("## tpcompile presets", "").replace("--fault-rank", "")) == [
        "gate --fault-rank",
        "presets --help",
    ]
    program = "import torch_stand_in as it; it.install(executed=()); import torch, tpcompile.sentinel; print(torch.x)"
    done = subprocess.run([sys.executable, "-c", program], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    assert done.stdout == "<class 'torch_stand_in.x'>\n"


def test_the_page_of_the_causes_has_each_cause_and_links_the_texts_that_exist(tmp_path: Path) -> None:
    page = runpy.run_path(str(SCRIPTS / "causes_page.py"))["page"]
    (tmp_path / "stride.md").touch()
    rows = page(tmp_path).splitlines()
    assert [cause for cause in Cause if not any(str(cause) in row for row in rows)] == []
    assert [row for row in rows if "](" in row] == [row for row in rows if "causes/stride.md" in row] != []


def undocumented(page: str) -> list[str]:
    """Public names that the page of the API has no entry for; a module's entry has all of its names."""
    entries = re.findall(r"^::: tpcompile\.(\S+)$", page, re.M)
    return [name for name in tpcompile.__all__ if name not in entries]


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert undocumented(page) == []
    assert undocumented(page.replace("::: tpcompile.check\n", "")) == ["check"]


def test_what_explains_arguments_becomes_their_section(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(Extension=object, Function=object, Class=object, Object=object)
    monkeypatch.setitem(sys.modules, "griffe", stand_in)
    with_section: Any = runpy.run_path(str(SCRIPTS / "arguments.py"))["with_section"]
    text = "Sum.\n\nNote: it waits.\n\na, b: numbers\nof one kind.\nc: a name\nRaises ConfigError.\n\nMore."
    assert with_section(text, {"a", "b", "c"}) == (
        "Sum.\n\nNote: it waits.\n\nMore.\n\nRaises ConfigError.\n\nArgs:\n"
        "    a: numbers\n        of one kind.\n    b: numbers\n        of one kind.\n    c: a name"
    )
    assert with_section(text, {"a"}) == text
    assert with_section('Sum.\n\ndst="I": identity.', {"dst"}) == 'Sum.\n\nArgs:\n    dst: with "I", identity.'


@pytest.mark.parametrize(
    ("name", "report", "field"),
    [("results", "first_verdict_cpu", "first verdict_s"), ("cost", "bench_report_cpu", "largest_process_kib")],
)
def test_a_page_of_results_is_what_their_files_say(name: str, report: str, field: str, tmp_path: Path) -> None:
    made = runpy.run_path(str(ROOT / "scripts" / f"{name}_page.py"))["page"]
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert made(ROOT / "results") == page, f"python scripts/{name}_page.py > docs/{name}.md"
    changed = tmp_path / "results"
    shutil.copytree(ROOT / "results", changed)
    text = (changed / f"{report}.json").read_text()
    (changed / f"{report}.json").write_text(re.sub(rf'("{field}":) [0-9.]+', r"\1 1000000", text, count=1))
    assert made(changed) != page


def public() -> Iterator[tuple[str, Any]]:
    """(name, object) of every function and class on the page of the API."""
    for name in tpcompile.__all__:
        found = getattr(tpcompile, name)
        members = getattr(found, "__all__", None) if isinstance(found, ModuleType) else None
        pairs = [(name, found)] if members is None else [(f"{name}.{one}", getattr(found, one)) for one in members]
        yield from ((each, one) for each, one in pairs if inspect.isfunction(one) or inspect.isclass(one))


def unexplained(found: Any) -> list[str]:
    """Parameters that the docstring does not name, unless it says where they are explained; fields have their own."""
    text = inspect.getdoc(found) or ""
    is_elsewhere = re.search(r"arguments\s+(are\s+those\s+of|as\s+for) `\w+`", text, re.IGNORECASE)
    if is_elsewhere or dataclasses.is_dataclass(found) or hasattr(found, "model_fields"):
        return []
    return [name for name in inspect.signature(found).parameters if not re.search(rf"\b{name}\b", text)]


@pytest.mark.slow
def test_every_argument_of_a_public_name_is_explained() -> None:
    assert {name: unexplained(found) for name, found in public() if unexplained(found)} == {}


def test_an_argument_that_is_not_explained_is_found() -> None:
    def doubled(x: int, times: int) -> None:
        """Double `x`."""

    assert unexplained(doubled) == ["times"]


def unknown_keywords(text: str) -> list[str]:
    """`f(..., keyword=value)` in code spans of a page, where `f` is public and has no such keyword."""
    known = {name.rpartition(".")[2]: one for name, one in public()} | {"watch": tpcompile.Sentinel.watch}
    found = []
    for span in re.findall(r"`([\w.]+\([^`]*\))`", text):
        try:
            call = ast.parse(span, mode="eval").body
        except SyntaxError:
            continue
        called = known.get(span.partition("(")[0].rpartition(".")[2])
        if called is not None and isinstance(call, ast.Call):
            parameters = inspect.signature(called).parameters
            takes_any = any(one.kind == one.VAR_KEYWORD for one in parameters.values())
            unknown = [one.arg for one in call.keywords if one.arg not in parameters]
            found += [] if takes_any else [f"{span}: {name}" for name in unknown]
    return found


@pytest.mark.slow
def test_calls_in_the_pages_have_keywords_that_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [one for page in pages for one in unknown_keywords(page.read_text())] == []
    text = "`capture(mesh, num_break=1)`, `sentinel.watch(x, uneven='')`, `Handshake(..., frozen=True)`"
    assert unknown_keywords(text) == ["capture(mesh, num_break=1): num_break"]


def limits(page: str) -> dict[str, float]:
    """Name -> seconds of each row of the table of limits."""
    return {name: float(seconds) for name, seconds in re.findall(r"^\| `(\w+_s)` \| (\d+) s \|", page, re.M)}


@pytest.mark.slow
def test_the_limits_on_the_page_of_the_sentinel_are_its_defaults() -> None:
    page = (ROOT / "docs" / "sentinel.md").read_text()
    parameters = inspect.signature(tpcompile.Sentinel).parameters
    expected = {name: one.default for name, one in parameters.items() if name.endswith("_s")}
    assert limits(page) == expected
    assert limits(page.replace("| 60 s |", "| 6 s |")) != expected
