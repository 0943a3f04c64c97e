"""A text that a test pins whole, in a file of tests/data: for the sentences of a renderer, once.

Record again with UPDATE_GOLDEN=1 and the pytest command of that test, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

DATA = Path(__file__).parent / "data"


def recorded(golden: Path, text: str) -> str:
    """What the file has; with UPDATE_GOLDEN, once this text is written to it."""
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    return golden.read_text(encoding="utf-8")
