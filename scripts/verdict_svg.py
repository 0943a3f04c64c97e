"""The red verdict of `tpcompile run` on examples/overflow.py, as a terminal shows it -> docs/verdict.svg.

    PYTHON 3.12 scripts/verdict_svg.py [FILE]

The job is real, with two gloo ranks. Shown is the first screen of the verdict, with paths from the checkout's root on.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "tpcompile run -- torchrun --nproc-per-node 2 examples/overflow.py"
_WIDTH = 120
_LINK = re.compile(r"\x1b\]8;[^\x1b]*\x1b\\")
_WEB_FONTS = re.compile(r"\s*@font-face \{.*?\}\n", re.S)


def main() -> None:
    """Run the job, and write the picture."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "verdict.svg"
    out.write_text(picture(verdict_of(said_by_the_job())))
    print(out)


def said_by_the_job() -> str:
    """All that the job and tpcompile print on a terminal."""
    printed: list[bytes] = []

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 1 << 16)
        printed.append(data)
        return data

    os.environ |= {"COLUMNS": str(_WIDTH), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-m", "tpcompile", "run", "--run-dir", f"{folder}/run", "--"]
        job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = os.waitstatus_to_exitcode(pty.spawn([*run, *job, "examples/overflow.py"], read))
    if ended != 1:
        raise SystemExit(f"the job ended with {ended}, not with 1")
    return b"".join(printed).decode(errors="replace")


def verdict_of(printed: str) -> str:
    """The first screen and the outcome, without hyperlinks: from the headline to the checks, and the last red line."""
    lines = _LINK.sub("", printed.replace(f"{ROOT}/", "")).splitlines()
    first = next(number for number, line in enumerate(lines) if "tpcompile run: " in line)
    end = next(number for number, line in enumerate(lines[first:], first) if not Text.from_ansi(line).plain.strip())
    outcome = next(line for line in reversed(lines) if "FAIL (exit " in line)
    return "\n".join([*lines[first:end], "...", outcome])


def picture(text: str) -> str:
    """An SVG that needs no fonts from elsewhere."""
    console = Console(record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(f"$ {COMMAND}\n...", markup=False, highlight=False)
    console.print(Text.from_ansi(text))
    drawn = console.export_svg(title="tpcompile", theme=DIMMED_MONOKAI, unique_id="verdict")
    drawn = _WEB_FONTS.sub("\n", drawn).replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


if __name__ == "__main__":
    main()
