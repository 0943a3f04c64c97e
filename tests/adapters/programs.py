"""The programs of examples/adapters, and faults put into copies of them; each run on real gloo ranks."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.forked import ROOT, torchrun

FOLDER = ROOT / "examples" / "adapters"
LIMIT_S = 150.0
_ERRORS = re.compile(r"error against one device: forward ([\d.e+-]+)(?:, gradients ([\d.e+-]+) \((\S+)\))?")


@dataclass(frozen=True)
class Adapter:
    """A program of examples/adapters and what it is called with."""

    name: str
    program: str
    needs: str = ""
    """Library that has to be installed."""
    arguments: tuple[str, ...] = ()
    nproc: int = 2
    smaller: tuple[tuple[str, str], ...] = ()
    """Edits of the tests: one block shows what two would."""


_LAYERS = ('"num_hidden_layers": 2', '"num_hidden_layers": 1')
_BLOCKS = ("Block(16) for _ in range(2)", "Block(16) for _ in range(1)")

ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter("transformers Llama", "transformers_plan", "transformers", ("Llama",), smaller=(_LAYERS,)),
        Adapter("transformers Qwen3", "transformers_plan", "transformers", ("Qwen3",)),
        Adapter("transformers Mixtral", "transformers_plan", "transformers", ("Mixtral",), smaller=(_LAYERS,)),
        Adapter("DTensor plan, sequence parallel", "dtensor_plan"),
        Adapter("per block, as torchtitan", "per_block"),
        Adapter("hooks, as gpt-fast", "gpt_fast_hooks", smaller=(_BLOCKS,)),
        Adapter("FSDP2 and TP", "fsdp_tp", nproc=4),
        Adapter("diffusers Wan block", "wan_block", "diffusers"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run printed, and what it says."""

    returncode: int
    """124 when it was killed at its limit."""
    text: str
    wall_s: float
    source: str
    """The program that ran."""

    @property
    def flat(self) -> str:
        """The text with the folds of narrow columns undone."""
        return re.sub(r"\s+", " ", self.text)

    @property
    def errors(self) -> tuple[float, float | None] | None:
        """(forward, gradients) against one device."""
        found = _ERRORS.search(self.flat)
        return found and (float(found[1]), float(found[2]) if found[2] else None)

    def number(self, pattern: str) -> int | None:
        """The first number that the text has in that place."""
        found = re.search(pattern, self.text)
        return int(found[1]) if found else None

    def line_of(self, marker: str) -> int:
        """Number of the one line of the program that ends in this comment."""
        (number,) = (n for n, line in enumerate(self.source.splitlines(), 1) if line.rstrip().endswith(marker))
        return number


def run_adapter(adapter: Adapter, folder: Path, *, backend: str) -> Outcome:
    """The program as it is."""
    return _run(FOLDER / f"{adapter.program}.py", adapter, folder, backend)


def run_edited(adapter: Adapter, edits: Sequence[tuple[str, str]], folder: Path, *, backend: str) -> Outcome:
    """A copy with lines replaced: (text that is there once, what stands there instead)."""
    source = (FOLDER / f"{adapter.program}.py").read_text()
    for old, new in edits:
        assert source.count(old) == 1, (adapter.program, old)
        source = source.replace(old, new)
    path = folder / f"{adapter.program}.py"
    path.write_text(source)
    return _run(path, adapter, folder, backend)


def _run(program: Path, adapter: Adapter, folder: Path, backend: str) -> Outcome:
    variables: Mapping[str, str] = {**os.environ, "BACKEND": backend, "COLUMNS": "200"}
    start_s = time.monotonic()
    ended = torchrun(
        [program, *adapter.arguments], nproc=adapter.nproc, environ=variables, cwd=folder, timeout_s=LIMIT_S
    )
    return Outcome(
        returncode=ended.returncode,
        text=ended.stdout + ended.stderr,
        wall_s=time.monotonic() - start_s,
        source=program.read_text(),
    )
