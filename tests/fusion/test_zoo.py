"""Programs of all kinds: every launch in the generated code is matched with what the scheduler decided."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path

import pytest
import torch

from tests.fusion import codegen
from tests.fusion.zoo import COLLECTIVES, ZOO, Program
from tpcompile.fusion import manifest as manifests
from tpcompile.fusion.manifest_records import Manifest, Role
from tpcompile.fusion.reasons import Boundary
from tpcompile.fusion.why_not import missed_fusions
from tpcompile.fusion.wrapper import launches

pytestmark = pytest.mark.slow
ALL = {**ZOO, **COLLECTIVES}
NO_REUSE = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Every buffer keeps its name in the generated code."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Manifest]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield {name: recorded(name, program) for name, program in ALL.items()}
    torch.compiler.reset()


def recorded(name: str, program: Program) -> Manifest:
    with codegen.one_rank() if name in COLLECTIVES else nullcontext():
        return codegen.recorded(program)


@pytest.mark.parametrize("name", ALL)
def test_launches_are_matched_with_the_scheduler_s_nodes(found: dict[str, Manifest], name: str) -> None:
    program, graphs = ALL[name], found[name].graphs
    assert len(graphs) == program.num_graphs + program.is_trained
    for graph in graphs:
        assert graph.is_aligned, graph.why_not_aligned
        assert graph.decisions is not None
        assert graph.decisions.unseen == ()
        assert manifests.total(graph.launches).kernels <= manifests.total_before(graph.decisions).kernels
        for launch in graph.launches:
            if launch.role in (Role.KERNEL, Role.COLLECTIVE):
                assert launch.lines, launch.name


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_launches_of_their_own(found: dict[str, Manifest], name: str) -> None:
    (graph,) = found[name].graphs
    roles = [launch.role for launch in graph.launches]
    assert (
        roles.count(Role.COLLECTIVE)
        == roles.count(Role.WAIT)
        == 1 + (name in ("two all_reduces", "reordered for overlap"))
    )


def test_an_operand_before_a_collective_and_its_use_behind_it_are_kept_apart_by_it(found: dict[str, Manifest]) -> None:
    (graph,) = found["all_gather"].graphs
    assert [launch.kind for launch in graph.launches] == ["cpp", "all_gather_into_tensor", "wait_tensor", "cpp"]
    first = missed_fusions(graph)[0]
    assert first.reason.boundary == "collective"
    assert any("zoo.py" in line.file for line in first.lines)


def test_nodes_that_are_fused_within_a_group_after_all_passes_are_those_of_the_launch(
    found: dict[str, Manifest],
) -> None:
    (grouped,), (plain,) = found["grouped"].graphs, found["softmax"].graphs
    assert grouped.decisions is not None
    assert plain.decisions is not None
    assert [one.name for one in grouped.decisions.before] == ["op0", "op1", "op2", "op3"]
    assert grouped.decisions.fused == plain.decisions.fused
    assert grouped.decisions.num_rounds > plain.decisions.num_rounds  # a first time, in which a group is not fused
    (launch,), (same,) = grouped.launches, plain.launches
    assert (launch.parts, launch.reads, launch.writes) == (same.parts, same.reads, same.writes)


def test_seeds_of_a_random_op_are_a_launch(found: dict[str, Manifest]) -> None:
    forward, _ = found["dropout"].graphs
    assert "aten.randint.low_out" in [launch.name for launch in forward.launches]


def test_three_pointwise_ops_are_one_kernel_and_half_the_bytes(found: dict[str, Manifest]) -> None:
    (graph,) = found["pointwise"].graphs
    assert graph.decisions is not None
    assert graph.decisions.ops.kernels == 3
    assert graph.decisions.ops.bytes == 2 * manifests.total(graph.launches).bytes  # 8 passes over memory, 4 fused


def test_a_library_call_is_named_after_what_it_computes_not_after_what_made_its_inputs(
    found: dict[str, Manifest],
) -> None:
    forward = found["feed-forward"].graphs[0]
    calls = [launch for launch in forward.launches if launch.role is Role.EXTERN]
    assert all(set(launch.ops) <= {"aten.mm", "aten.addmm", "aten.add"} for launch in calls)


def test_torchs_own_choices_refuse_no_pair_in_silence(found: dict[str, Manifest]) -> None:
    missed = [one for manifest in found.values() for graph in manifest.graphs for one in missed_fusions(graph)]
    assert len(missed) > 50
    assert [one for one in missed if one.reason.boundary is Boundary.CHOICES] == []


# The launches name their buffers in the generated code: the nodes that they were matched with write the same ones.


@pytest.mark.parametrize("name", ["feed-forward", "layer norm", "linear", "convolution", "two all_reduces"])
def test_the_nodes_of_a_launch_write_the_buffers_that_its_code_names(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    codes: list[str] = []
    monkeypatch.setattr(manifests, "launches", lambda code: codes.append(code) or launches(code))
    program = ALL[name]
    changed = Program(**{**vars(program), "options": {**program.options, **NO_REUSE}})
    graphs = recorded(name, changed).graphs
    for graph, code in zip(graphs, codes, strict=True):
        assert checked(graph.launches, code)


def checked(launched: tuple[manifests.Launch, ...], code: str) -> int:
    """Launches of kernels in order, each with the names in its line of code; the number that was compared."""
    body = code[code.index("def call(") :]
    lines = [line for line in body.splitlines() if re.search(r"cpp_fused_\w+\(|extern_kernels\.", line)]
    kernels = [one for one in launched if one.name in body and one.role in (Role.KERNEL, Role.EXTERN)]
    kernels = [one for one in kernels if re.match(r"cpp_fused|extern_kernels", one.name)]
    calls = [
        list(nodes) for name, nodes in groupby(kernels, key=lambda one: (one.role, one.name if one.source else one))
    ]
    assert len(lines) == len(calls)
    for line, nodes in zip(lines, calls, strict=True):
        named = set(re.findall(r"\bbuf\d+\b", line))
        written = {name for one in nodes for name in one.writes if name.startswith("buf")}
        assert written <= named, f"{nodes[0].name} writes {written}, and the code is {line.strip()}"
    return len(calls)


@pytest.mark.gpu(1)
@pytest.mark.timeout(600)
def test_on_a_gpu_manifests_are_aligned_and_the_profiler_sees_the_same_kernels(tmp_path: Path) -> None:
    out = tmp_path / "zoo.json"
    command = [sys.executable, "-m", "tests.fusion.on_gpu", out]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert ended.returncode == 0, ended.stderr
    for name, row in json.loads(out.read_text())["programs"].items():
        assert "failed" not in row, (name, row)
        assert (row["why not aligned"], row["not seen"]) == ([], []), name
        assert row["kernels"] == row["kernels launched"], name
