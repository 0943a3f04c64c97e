"""`tpcompile.fusion.targets`: a target is recorded as it is compiled now, whatever a cache holds."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tpcompile.fusion import targets
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.torch_api.simulated import local_ranks

pytestmark = pytest.mark.slow
TARGET = "tests.fusion.models:on_cpu"


def compile_without_decisions() -> bool:
    """Compile and run it as any program does; True where a recorder then finds only code of the cache."""
    with local_ranks(1):
        built = targets.built_on(torch.device("cpu"), TARGET, (), nproc=1, building=nullcontext())
        torch.compile(built.program)(*built.inputs)
        torch.compiler.reset()
        with FusionRecorder() as recorder:
            torch.compile(built.program)(*built.inputs)
    torch.compiler.reset()
    return not any(graph.is_aligned for graph in recorder.manifest().graphs)


def test_a_warm_cache_does_not_hide_what_was_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert compile_without_decisions()
    found = targets.record(TARGET, device="cpu")
    assert [(graph.is_cached, graph.is_aligned) for graph in found.graphs] == [(False, True)]
    assert all(launch.bytes > 0 for graph in found.graphs for launch in graph.launches)
