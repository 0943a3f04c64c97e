"""The lists of packages and modules, in docs/development.md and in docstrings of packages, are those of the tree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tpcompile"
_LINE = re.compile(r"^(?:\w+\.py|\w+/)\s", re.M)


def packages() -> list[Path]:
    """The packages whose docstring lists their modules."""
    return [init.parent for init in sorted(PACKAGE.rglob("__init__.py")) if len(_LINE.findall(docstring(init))) > 1]


def docstring(init: Path) -> str:
    return ast.get_docstring(ast.parse(init.read_text())) or ""


def modules(folder: Path) -> set[str]:
    """Names of modules and of packages in a folder."""
    files = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def problems(listed: set[str], folder: Path) -> list[str]:
    """What a list of the modules of a folder lacks, and what it names that does not exist."""
    lacks = [f"{name} is not listed" for name in sorted(modules(folder) - listed)]
    return lacks + [f"{name} does not exist" for name in sorted(listed - modules(folder))]


def listed_in(text: str) -> set[str]:
    """Names of modules in a docstring: `name.py` anywhere, `name/` at the beginning of a line."""
    found = {*re.findall(r"\b(\w+)\.py\b", text), *re.findall(r"^(\w+)/\s", text, re.M)}
    return {name for name in found if not name.startswith("__")}


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.name)
def test_a_package_that_lists_its_modules_lists_all_of_them(package: Path) -> None:
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    listed = listed_in(docstring(package / "__init__.py"))
    assert problems(listed - (scripts - modules(package)), package) == []


def test_the_page_lists_all_packages() -> None:
    text = (ROOT / "docs" / "development.md").read_text()
    rows = re.findall(r"^- (`[^:]*`): ", text, re.M)
    assert problems({name for row in rows for name in re.findall(r"`(\w+)`", row)}, PACKAGE) == []


def test_a_module_that_is_missing_in_a_list_or_in_the_tree_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.py").touch()
    assert problems({"gone"}, tmp_path) == ["here is not listed", "gone does not exist"]
