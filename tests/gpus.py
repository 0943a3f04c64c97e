"""A program that sees the GPUs, which a process of pytest does not: it was forked, or may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def printed_by(text: str, folder: Path) -> list[str]:
    """The lines that a program prints; it must end well."""
    program = folder / "program.py"
    program.write_text(text)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
