"""The picture of a terminal -> the text on it."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
VERDICT = ROOT / "docs" / "verdict.svg"


def text_of(picture: Path) -> str:
    """What stands on the picture, line by line."""
    lines: dict[float, str] = {}
    for node in ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}text"):
        y = float(node.attrib["y"])
        lines[y] = lines.get(y, "") + re.sub(r"\s", " ", node.text or "")  # its spaces do not break
    return "\n".join(line.rstrip() for _, line in sorted(lines.items())) + "\n"
