"""Every cause that a verdict can name -> a page of Markdown, without torch: `python scripts/docs/causes_page.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ROOT / "tpcompile" / "explain" / "causes"
"""A text for each cause, if there are any: `tpcompile explain` prints them, and the site has a page of each."""
sys.path.insert(0, str(ROOT))

_HEAD = """\
# Causes

The causes that a verdict can name, in the order of the code, with what to do. A cause without advice is either green or
says all that is known in the finding itself.

| cause | what to do |
|---|---|
"""


def page(texts: Path = TEXTS) -> str:
    """The page, with a link to the text of each cause that has one."""
    return _HEAD + "".join(_rows(texts))


def _rows(texts: Path) -> Iterator[str]:
    from tpcompile.evidence.records.causes import Cause

    for cause in Cause:
        name = f"{cause.name.lower().replace('_', '-')}.md"
        shown = f"[{cause}](causes/{name})" if (texts / name).exists() else str(cause)
        advice = (cause.advice or cause.note).replace("|", "\\|")
        yield f"| {shown} | {advice} |\n"


if __name__ == "__main__":
    print(page(), end="")
