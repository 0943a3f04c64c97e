"""What mkdocs calls: adds the pages that are in no file under docs/, those of the commands and of the causes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

_HERE = Path(__file__).parent
_CAUSES = _HERE.parents[1] / "tpcompile" / "explain" / "causes"


def on_files(files: Any, *, config: Any) -> Any:
    """Add cli.md, causes.md, and a page for each cause that has a text."""
    for name in ("cli", "causes"):
        files.append(File.generated(config, f"{name}.md", content=_made_by(f"{name}_page.py")))
    for path in sorted(_CAUSES.glob("*.md")):
        text = path.read_text()
        files.append(File.generated(config, f"causes/{path.name}", content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def _made_by(script: str) -> str:
    """What it prints, in a process of its own: it may import stand-ins for torch."""
    command = [sys.executable, str(_HERE / script)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
