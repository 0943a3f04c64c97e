"""The recorder sees every thread and every cache, changes nothing, and says what it could not see."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.choices import InductorChoices

from tests.fusion import codegen
from tests.fusion.zoo import ZOO
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.reasons import Boundary
from tpcompile.fusion.recorder import FusionRecorder
from tpcompile.fusion.why_not import missed_fusions
from tpcompile.torch_api import scheduling

pytestmark = pytest.mark.slow
PROGRAM = ZOO["softmax"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_compiler: None) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_cache_hit_has_the_decisions_of_the_compile_that_filled_the_cache() -> None:
    cold, warm = codegen.recorded(PROGRAM), codegen.recorded(PROGRAM)
    assert [graph.is_cached for graph in (*cold.graphs, *warm.graphs)] == [False, True]
    assert warm.graphs[0].launches == cold.graphs[0].launches
    assert warm.graphs[0].decisions == cold.graphs[0].decisions


def test_code_that_was_cached_without_a_recorder_is_known_by_its_launches_alone() -> None:
    with codegen.generating():
        PROGRAM.step()()
    (graph,) = codegen.recorded(PROGRAM).graphs
    assert not graph.is_aligned
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in graph.why_not_aligned
    assert [launch.name for launch in graph.launches] == ["cpp_fused__softmax_0"]


def test_a_recorder_does_not_change_what_the_caches_hold(own_cache: Path) -> None:
    codegen.recorded(PROGRAM)
    with codegen.generating():
        torch.compiler.reset()
        missed: list[Any] = []
        with scheduling.decisions(lambda _code, decisions: missed.append(decisions)):
            PROGRAM.step()()
    assert missed == [None]  # a hit


def test_compiles_of_all_threads_are_recorded() -> None:
    with codegen.generating(), FusionRecorder() as recorder:
        thread = threading.Thread(target=PROGRAM.step())
        thread.start()
        thread.join()
    (graph,) = recorder.manifest().graphs
    assert graph.is_aligned
    assert graph.decisions is not None
    assert graph.decisions.pairs


def test_nothing_is_recorded_after_its_end_and_torch_is_as_before() -> None:
    log = scheduling._scheduler.fusion_log
    before = log.level, log.propagate, list(log.handlers), scheduling.GraphLowering.save_output_code
    with FusionRecorder() as recorder:
        pass
    with codegen.generating():
        PROGRAM.step()()
    assert recorder.manifest().graphs == ()
    assert (log.level, log.propagate, list(log.handlers), scheduling.GraphLowering.save_output_code) == before


def test_what_is_compiled_for_the_cpu_beside_a_gpu_is_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with codegen.generating(), FusionRecorder() as recorder:
        PROGRAM.step()()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert recorder.manifest().device == "cpu"


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "torch's own"])
def test_a_pair_that_replaced_choices_refuse_in_silence_is_said_to_be_refused(
    replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if replaced:
        monkeypatch.setattr(InductorChoices, "can_fuse", staticmethod(lambda *_: False))
    (graph,) = codegen.recorded(PROGRAM).graphs
    boundaries = {one.reason.boundary for one in missed_fusions(graph)}
    assert (Boundary.CHOICES in boundaries) == replaced
    assert Boundary.NOT_TRIED not in boundaries


# Torch moves


def without_the_start(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduling, "_BEFORE_SCHEDULING", "renamed")


def without_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduling._LogHandler, "emit", lambda *_: None)


def without_the_choices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduling, "_install_choices", lambda _: None)


def without_names(patch: pytest.MonkeyPatch) -> None:
    """What reads the nodes raises."""
    patch.setattr(scheduling.scheduled, "node", lambda _: {}["renamed"])


def without_a_node(patch: pytest.MonkeyPatch) -> None:
    generated = scheduling.scheduled.generated_nodes
    patch.setattr(scheduling.scheduled, "generated_nodes", lambda: generated()[1:])


def graph_of(manifest: Manifest) -> Any:
    return manifest.graphs[0]


MOVED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, tuple[str, ...]]] = {
    "start": (without_the_start, "the scheduler was not seen", ()),
    "names": (without_names, "the scheduler was not seen", ()),
    "nodes": (without_a_node, "the code launches 1 kernel, the scheduler's nodes are nothing", ()),
    "log": (without_the_log, "", ('fusions in the log "fusion"',)),
    "choices": (without_the_choices, "", ("scores of pairs",)),
}


def test_code_that_cannot_be_read_leaves_no_manifest_and_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tpcompile.fusion.recorder.graph_manifest", lambda *_, **__: {}["renamed"])
    assert codegen.recorded(PROGRAM).graphs == ()


@pytest.mark.parametrize("name", MOVED)
def test_what_can_no_longer_be_seen_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, why_not, unseen = MOVED[name]
    break_it(monkeypatch)
    graph = graph_of(codegen.recorded(PROGRAM))
    assert graph.is_aligned == (not why_not)
    assert graph.why_not_aligned.startswith(why_not)
    assert (graph.decisions.unseen if graph.decisions else ()) == unseen
