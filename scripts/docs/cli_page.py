"""Every command with its options -> a page of Markdown, without torch: `python scripts/docs/cli_page.py`."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2])]
os.environ.setdefault("COLUMNS", "100")

import torch_stand_in  # noqa: E402

_HEAD = """\
# Commands

Made from the commands themselves when the site is built: what `tpcompile COMMAND --help` prints.
"""
_PASSED_ON = {
    "bench": "tpcompile.bench.__main__",
    "certify": "tpcompile.fastpath.certify.__main__",
    "dryrun": "tpcompile.dryrun.__main__",
    "fusion": "tpcompile.fusion.__main__",
    "typecheck": "tpcompile.typecheck.__main__",
    "verify-win": "tpcompile.fusion.win.__main__",
}
"""Commands whose arguments go to a module, which has the options."""


def page() -> str:
    """The page; torch and triton must not be imported in this process."""
    torch_stand_in.install(executed=_PASSED_ON.values())
    import typer

    from tpcompile.cli import app

    group = typer.main.get_command(app)
    parts = [_HEAD, _table(group.commands)]  # type: ignore[attr-defined]  # a group has commands
    for name, command in group.commands.items():  # type: ignore[attr-defined]  # as above
        parts += _of_command(f"tpcompile {name}", _with_options(name, command))
    return "\n".join(parts)


def _table(commands: dict[str, Any]) -> str:
    rows = (f"| [`tpcompile {name}`](#tpcompile-{name}) | {_sentence(one)} |" for name, one in commands.items())
    return "| command | |\n|---|---|\n" + "\n".join(rows) + "\n"


def _sentence(command: Any) -> str:
    sentence = " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split())
    return sentence.replace("; `--help` says how", "")


def _with_options(name: str, command: Any) -> Any:
    """The command that has the options: of one whose arguments are passed on, that of the module which gets them."""
    import typer

    if not command.context_settings.get("ignore_unknown_options"):
        return command
    return typer.main.get_command(import_module(_PASSED_ON[name]).app)


def _of_command(name: str, command: Any) -> Iterator[str]:
    level = "#" * (len(name.split()))
    context = command.make_context(name, [], resilient_parsing=True, **command.context_settings)
    yield f"{level} {name}\n\n```text\n{_help(context)}\n```\n"
    for sub, one in getattr(command, "commands", {}).items():
        yield from _of_command(f"{name} {sub}", one)


def _help(context: Any) -> str:
    lines = (line.rstrip() for line in context.get_help().strip().splitlines())
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(), end="")
