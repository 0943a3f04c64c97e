"""What messages and pages name exists: commands of tpcompile with their flags, pages, modules and functions."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![a-z{-])")
PAGE = re.compile(r"\bdocs/(?:[\w-]+/)*[\w-]+\.md")
NAME = re.compile(r"\btpcompile(?:\.[A-Za-z_]\w*)+")
PASSED_ON = {
    "fusion": "tpcompile.fusion.__main__", "verify-win": "tpcompile.fusion.win.__main__",
    "certify": "tpcompile.fastpath.certify.__main__",
    "bench": "tpcompile.bench.__main__", "typecheck": "tpcompile.typecheck.__main__",
    "dryrun": "tpcompile.dryrun.__main__",
}  # fmt: skip
"""Commands whose arguments go to a module of their own."""
OF_OTHERS = {
    "--standalone", "--nproc-per-node", "--no-python", "--nnodes", "--max-restarts", "--ntasks", "--kill-on-bad-exit",
    "--pty", "--pid", "--pdb", "--trace", "--timeout", "--durations", "--fast", "--gpus-per-task",
    "--master-port", "--shm-size", "--ipc",
}  # fmt: skip
"""Flags of torchrun, srun, py-spy, pytest, docker and scripts/test.sh."""


def options(command: object) -> set[str]:
    """All flags of a command, its subcommands among them."""
    found = {flag for option in getattr(command, "params", ()) for flag in (*option.opts, *option.secondary_opts)}
    for sub in getattr(command, "commands", {}).values():
        found |= options(sub)
    return found | {"--help", "-h"}


@cache
def commands() -> dict[str, object]:
    """`gate`, `fusion record`, ... -> the command of typer."""
    from tpcompile.cli import app

    found: dict[str, object] = {}
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        own = PASSED_ON.get(name)
        command = command if own is None else typer.main.get_command(importlib.import_module(own).app)
        found[name] = command
        for sub_name, sub in getattr(command, "commands", {}).items():
            found[f"{name} {sub_name}"] = sub
    return found


@cache
def all_options() -> set[str]:
    """Flags of all commands, and those that a script or a plugin declares."""
    found = set[str]().union(*map(options, commands().values()), OF_OTHERS, ["--version", "--install-completion"])
    for root in ("scripts", "repro", "examples", "tests", "tpcompile"):
        for path in (ROOT / root).rglob("*.py"):
            found |= set(
                re.findall(r"(?:add_argument|addoption|Option)\([^)]*?[\"'](--[a-z-]+)[\"']", path.read_text())
            )
    return found


def messages(root: Path = ROOT / "tpcompile") -> Iterator[tuple[str, str]]:
    """(file, text) of every string in the source, docstrings among them."""
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                yield path.name, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield path.name, node.value


def pages() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        if page.name == "results.md":  # it has commands of earlier commits
            continue
        for line in page.read_text().splitlines():
            yield page.name, line


def wrong_commands(text: str) -> Iterator[str]:
    """`tpcompile COMMAND --flag` without such a command, or whose command has no such flag."""
    for quoted in re.findall(r"`(tpcompile [a-z][^`:]*)`", text):
        words = quoted.split()
        named = [name for name in (" ".join(words[1:3]), words[1]) if name in commands()]
        subcommands = getattr(commands().get(words[1]), "commands", {})
        is_unknown = not named or (len(words) > 2 and subcommands and words[2] not in {*subcommands, "--help"})
        if is_unknown:
            yield quoted
        else:
            yield from (
                f"{named[0]} {flag}" for flag in FLAG.findall(quoted) if flag not in options(commands()[named[0]])
            )


def is_there(name: str) -> bool:
    """Whether a dotted name is a module, or something in one."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def missing(texts: Iterator[tuple[str, str]]) -> set[str]:
    """What is named and does not exist."""
    found = set()
    for file, text in texts:
        found |= {f"{file}: {command}" for command in wrong_commands(text)}
        found |= {f"{file}: {flag}" for flag in FLAG.findall(text) if flag not in all_options()}
        found |= {f"{file}: {page}" for page in PAGE.findall(text) if not (ROOT / page).exists()}
        found |= {f"{file}: {name}" for name in NAME.findall(text) if not is_there(name)}
    return found


def test_messages_name_what_exists() -> None:
    assert missing(messages()) == set()


def test_pages_name_what_exists() -> None:
    assert missing(pages()) == set()


@pytest.mark.parametrize(
    "text",
    [
        "run `tpcompile gait`", "run `tpcompile gate --no-such-flag`", "pass --no-such-flag", "see docs/nowhere.md",
        "call tpcompile.testing.nothing", "`tpcompile fusion recrod x`",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_found(text: str) -> None:
    assert missing(iter([("message", text)]))
