"""Code out of Inductor's cache is at the lines of the program that runs it, not at those of the one that filled it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.utils import fresh_cache

from tpcompile.recording import CaptureSession

BLOCK = "def block(x, w):\n    y = x @ w\n    return y @ w\n"


@pytest.fixture
def own_cache(fresh_compiler: None) -> Iterator[None]:
    """An empty cache that is left behind empty."""
    with fresh_cache():
        yield


def program(file: Path, *, lines_above: int) -> Callable[[Tensor, Tensor], Tensor]:
    """The block in a file of its own."""
    file.write_text("\n" * lines_above + BLOCK)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Tensor, Tensor], Tensor] = module.block
    return found


def lines_shown() -> list[tuple[str, int]]:
    """File and line of everything that the profiler can show of generated code."""
    PyCodeCache.stack_frames_for_code.cache_clear()
    paths = [(path, line) for path, (lines, _) in PyCodeCache.linemaps.items() for line in lines]
    found = [PyCodeCache.stack_frames_for_code(path, line) or [] for path, line in paths]
    return sorted({(Path(frame["filename"]).name, frame["line"]) for frames in found for frame in frames})


def run(block: Callable[[Tensor, Tensor], Tensor]) -> CaptureSession:
    """Compile and run it, as in a new process."""
    torch.compiler.reset()
    PyCodeCache.linemaps.clear()
    with CaptureSession() as session:
        torch.compile(block)(torch.ones(4, 4), torch.ones(4, 4))
    return session


@pytest.mark.slow
def test_code_from_a_cache_is_at_the_lines_of_this_program(own_cache: None, tmp_path: Path) -> None:
    run(program(tmp_path / "first.py", lines_above=0))
    assert lines_shown() == [("first.py", 2), ("first.py", 3)]
    session = run(program(tmp_path / "second.py", lines_above=5))
    assert "aotautograd_cache_hit" in session.compiles()[0].cache
    assert lines_shown() == [("second.py", 7), ("second.py", 8)]
