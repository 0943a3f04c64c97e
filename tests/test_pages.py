"""README, docs/ and examples/ci: the commands, paths, links, exit codes and names in them exist."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import tpcompile
from tests.picture import VERDICT, text_of
from tpcompile import cli
from tpcompile.cli.defaults import defaults
from tpcompile.config import GateConfig
from tpcompile.errors import ExitCode

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")))
ACTION = ROOT / "examples" / "ci" / "gate.yml"
_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```$", re.M | re.S)
_OURS = re.compile(r"\s*(?:run: )?(?:(?:srun|torchrun) (?:-\S+ |\d+ )+)?((?:python -m )?tpcompile .*)")
"""A line of a block, from our command on."""
_PATH = re.compile(r"\b(?:docs|scripts|results|examples|repro|configs)/[\w./*-]*\w")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(#[^)]*)?\)")


@cache
def commands() -> dict[str, Any]:
    """Name of a subcommand -> its click command."""
    from tpcompile.bench import __main__ as bench
    from tpcompile.dryrun import __main__ as dryrun
    from tpcompile.fastpath.certify import __main__ as certify
    from tpcompile.fusion import __main__ as fusion
    from tpcompile.fusion.win import __main__ as win
    from tpcompile.typecheck import __main__ as typecheck

    found = dict(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
    found["bench"] = typer.main.get_command(bench.app)
    found["certify"] = typer.main.get_command(certify.app)
    found["dryrun"] = typer.main.get_command(dryrun.app)
    found["typecheck"] = typer.main.get_command(typecheck.app)
    found["verify-win"] = typer.main.get_command(win.app)
    commands = typer.main.get_command(fusion.app).commands  # type: ignore[attr-defined]
    return found | {f"fusion {sub}": one for sub, one in commands.items()}


def options_of(command: Any) -> set[str]:
    """All spellings of its options."""
    spelled = {name for one in command.params for name in (*one.opts, *one.secondary_opts) if name.startswith("-")}
    return {*spelled, "-h", "--help"}


def written(text: str) -> Iterator[str]:
    """Every command line of `tpcompile`, in blocks and code spans: alone, behind a launcher, in a list of YAML."""
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            found = _OURS.match(line)
            if found is not None:
                yield found[1]
            elif found := re.match(r"\s*command: (\[.*\])$", line):
                yield shlex.join(yaml.safe_load(found[1]))
    yield from re.findall(r"`(tpcompile [a-z-][^`]*)`", _BLOCK.sub("", text))


def problem(line: str) -> str:
    """What is wrong with a command line of ours; empty for nothing."""
    line = line.removeprefix("python -m ")
    if re.match(r"tpcompile \w+:", line):  # a line that it prints
        return ""
    words = shlex.split(re.split(r"\s[|>&]|\s\|\||;", line)[0].partition("  #")[0].replace("'", ""))[1:]
    words = words[: words.index("--")] if "--" in words else words  # the rest is another program's
    words = [word.strip("[]") for word in words]
    if words and words[0].startswith("-"):
        known = {"--help", "-h", "--version", "--install-completion", "--show-completion"}
        return "" if words[0] in known else f"{line}: no option {words[0]}"
    name = " ".join(words[:2]) if words[0] == "fusion" and len(words) > 1 else words[0]
    if name == "fusion":
        return ""
    command = commands().get(name)
    if command is None:
        return f"{line}: no command {name!r}"
    unknown = [w for w in words if w.startswith("-") and w != "-" and w.partition("=")[0] not in options_of(command)]
    return f"{line}: no option {unknown[0]}" if unknown else ""


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    added = {"tpcompile causes"}  # by CONTRIBUTING
    lines = [line for line in written(page.read_text()) if line not in added]
    assert [said for said in map(problem, lines) if said] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "tpcompile gates",
        "tpcompile gate --nprocs 2",
        "tpcompile fusion shows",
        "tpcompile --versions",
        "tpcompile fusion show x --nope",
        "srun --ntasks 8 --kill-on-bad-exit tpcompile gate --nprocs 2",
    ],
)
def test_a_command_or_option_that_does_not_exist_is_found(line: str) -> None:
    found = list(map(problem, written(f"```\n{line}\n```\n")))
    assert found and all(found)


@pytest.mark.slow
def test_the_command_of_a_container_is_checked_as_well() -> None:
    text = '```yaml\n  command: ["tpcompile", "gate", "--nprocs", "2"]\n```\n'
    assert list(map(problem, written(text))) == ["tpcompile gate --nprocs 2: no option --nprocs"]


def is_read(language: str, body: str) -> bool:
    """True for a block that its language's parser reads; of a diagram, with a kind that mermaid has."""
    try:
        if language == "yaml":
            yaml.safe_load(body)
        elif language == "toml":
            tomllib.loads(body)
    except (yaml.YAMLError, tomllib.TOMLDecodeError):
        return False
    ids = re.sub(r'"[^"]*"|\|[^|]*\|', "", body).split()
    is_diagram = (
        "graph" not in ids
        and bool(re.match(r"(flowchart (LR|TB)|sequenceDiagram)\n", body))
        and body.count("subgraph") == len(re.findall(r"^\s*end$", body, re.M))
    )
    return is_diagram if language == "mermaid" else language in {"", "bash", "diff", "python", "text", "toml", "yaml"}


def unread(text: str) -> list[str]:
    """First lines of blocks that are not what their language says, or that no test knows how to check."""
    return [body.partition("\n")[0] for language, body in fenced(text) if not is_read(language, body)]


def fenced(text: str) -> list[tuple[str, str]]:
    """(language, body) of every block."""
    return re.findall(r"^```(.*)\n((?:.*\n)*?)```$", text, re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_what_its_language_says(page: Path) -> None:
    assert unread(page.read_text()) == []


@pytest.mark.parametrize(
    "block",
    [
        "yaml\na: [1",
        "toml\na = ",
        "mermaid\nflowchart UP\n  a",
        "mermaid\nflowchart LR\nsubgraph a",
        "mermaid\nflowchart LR\na --> graph",
        "jsonn\n{}",
    ],
)
def test_a_block_that_its_parser_does_not_read_is_found(block: str) -> None:
    assert unread(f"```{block}\n```\n")


_QUOTED = re.compile(r"([\w/]+\.py):(\d+) in ([\w<>]+)[^\n]*\n(?: {4,}(\S[^\n]*))?")
"""`file.py:12 in f`, with or without that line below it."""


def wrong_quotes(text: str) -> list[str]:
    """Places in what a block prints where that file of ours has a different line, or one of a different function."""
    printed = "".join(body for language, body in fenced(text) if not language)
    return [f"{one[1]}:{one[2]}" for one in _QUOTED.finditer(printed) if not is_quoted_rightly(*one.groups())]


def is_quoted_rightly(file: str, line: str, function: str, code: str | None) -> bool:
    """True as well where no file of ours has that name."""
    sources = [path for root in ("examples", "tests", "tpcompile") for path in (ROOT / root).rglob(Path(file).name)]
    ours = [path.read_text() for path in sources if str(path).endswith(f"/{file}")]
    return not ours or any(is_line_of(source, int(line), function, code) for source in ours)


def is_line_of(source: str, line: int, function: str, code: str | None) -> bool:
    around = [
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    is_there = function == "<module>" or function in around
    return is_there and (code is None or code == source.splitlines()[line - 1].strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_source_lines_that_a_page_quotes_are_those_of_the_files(page: Path) -> None:
    assert wrong_quotes(page.read_text()) == []


def test_a_quoted_line_that_has_moved_is_found() -> None:
    text = f"```\n{text_of(VERDICT)}```\n"
    assert wrong_quotes(text) == []
    moved = text.replace("overflow.py:33 in", "overflow.py:30 in")
    assert wrong_quotes(moved) == ["examples/overflow.py:30"]
    assert wrong_quotes("```\nat overflow.py:26 in synchronize, which\n```\n") == []
    assert wrong_quotes("```\nat overflow.py:26 in overflowed, which\n```\n") == ["overflow.py:26"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text() if page.name != "results.md" else ""  # it has commands of earlier commits
    paths = {path for path in _PATH.findall(re.sub(r"^```diff.*?^```$", "", text, flags=re.M | re.S))}
    linked = {str((page.parent / path).resolve().relative_to(ROOT)) for path, _ in _LINK.findall(text)}
    missing = [path for path in sorted({*paths, *linked}) if not exists(path)]
    assert missing == []


def exists(path: str) -> bool:
    """True for a path, a pattern, or a path without its suffix in the repository."""
    stem = path.rstrip("-.")
    return (ROOT / stem).exists() or any(ROOT.glob(path)) or any(ROOT.glob(f"{stem}*"))


def test_a_path_that_does_not_exist_is_found() -> None:
    assert not exists("docs/nope.md") and exists("docs/gate.md")


def test_links_to_a_heading_name_one() -> None:
    for page in PAGES:
        for path, anchor in _LINK.findall(page.read_text()):
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (page.parent / path).read_text(), re.M)
                known = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor[1:] in known, f"{page.name}: {path}{anchor}"


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120 and len(text.split()) <= 900
    linked = {path for path, _ in _LINK.findall(text)}
    assert {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} <= linked


def test_every_exit_code_is_documented() -> None:
    text = (ROOT / "docs" / "gate.md").read_text()
    section = text[text.index("Exit codes of") :].partition("\n\n")[0]
    assert [code for code in ExitCode if not re.search(rf"\b{int(code)}\b", section)] == []


def test_the_defaults_of_the_page_are_keys_that_exist(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```$", (ROOT / "docs" / "ci.md").read_text(), re.M | re.S)
    (tmp_path / "pyproject.toml").write_text(block)
    assert len(defaults(None, tmp_path)) == len(tomllib.loads(block)["tool"]["tpcompile"])


def steps() -> list[dict[str, Any]]:
    """Steps of the example for GitHub."""
    found: list[dict[str, Any]] = yaml.safe_load(ACTION.read_text())["jobs"]["gate"]["steps"]
    return found


@pytest.mark.slow
def test_the_action_is_that_of_the_page_and_calls_commands_that_exist() -> None:
    assert ACTION.read_text() in (ROOT / "docs" / "ci.md").read_text()
    runs = [line.strip() for step in steps() for line in step.get("run", "").splitlines()]
    ours = [line for line in runs if line.startswith("tpcompile")]
    assert len(ours) == 2
    assert [said for said in map(problem, ours) if said] == []


def test_the_action_installs_the_torch_that_is_tested() -> None:
    pinned = re.search(r'DEFAULT_TORCH="(.*)"', (ROOT / "scripts" / "venv.sh").read_text())
    assert pinned is not None
    assert [step for step in steps() if pinned[1] in step.get("run", "")]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "tpcompile" / "py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Typing :: Typed" in project["classifiers"] and project["keywords"]
    assert (f"\n## {tpcompile.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()) and project[
        "readme"
    ] == "README.md"


def settings(page: str) -> list[tuple[str, str]]:
    """(name, default) of each row of the table of settings."""
    return re.findall(r"^\| `gate\.(\w+)` \| ([^|]+) \|", page, re.M)


def default_text(name: str, value: object) -> str:
    """A default as the page has it, with its unit."""
    if value in (None, ()):
        return "none"
    return f"{value:g} s" if name.endswith("_s") else str(value)


def test_the_page_of_the_gate_has_every_setting_with_its_default() -> None:
    expected = [(name, default_text(name, field.default)) for name, field in GateConfig.model_fields.items()]
    page = (ROOT / "docs" / "gate.md").read_text()
    assert settings(page) == expected
    assert settings(page.replace("| 300 s |", "| 30 s |")) != expected
