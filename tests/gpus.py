"""A program that sees the GPUs, which a process of pytest does not: it was forked, or may be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def printed_by(text: str, folder: Path) -> list[str]:
    """The lines that a program prints; it must end well."""
    program = folder / "program.py"
    program.write_text(text)
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
