"""TORCH_TRACE files -> pages of tlparse beside ours, where it is installed: `pip install "tpcompile[tlparse]"`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

_LIMIT_S = 120.0


def tlparse_pages(logs: Path, page: Path) -> dict[int, str]:
    """Rank -> the address of its pages, relative to `page`; empty where there is no tlparse, or it fails.

    They are in a folder beside the page, `report_tlparse` for `report.html`; what was in it is replaced.
    """
    tool = shutil.which("tlparse", path=str(Path(sys.executable).parent)) or shutil.which("tlparse")
    if tool is None or (page.exists() and not page.is_file()):  # /dev/stdout has nothing beside it
        return {}
    out = page.with_name(f"{page.stem}_tlparse")
    command = [tool, str(logs), "--all-ranks-html", "--no-browser", "--overwrite", "-o", str(out)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    if done.returncode:
        return {}
    ranks = [folder.name.partition("_")[2] for folder in out.glob("rank_*") if (folder / "index.html").exists()]
    return {int(rank): quote(f"{out.name}/rank_{rank}/index.html") for rank in ranks if rank.isdecimal()}
