"""What a baseline allows: no more launches, a few more bytes, known misses; and what leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence.records import UserLine
from tpcompile.fusion import baseline as baselines
from tpcompile.fusion import recorder
from tpcompile.fusion.baseline import GraphBaseline, baseline_of, compare
from tpcompile.fusion.manifest import _as_launched
from tpcompile.fusion.manifest_records import Decisions, GraphManifest, Launch, Manifest, Node, Pair, Role, Totals
from tpcompile.fusion.why_not import Missed

LINE = UserLine(file="/app/model.py", line=7)


def kernel(name: str, reads: dict[str, int], writes: dict[str, int], op: str = "relu") -> Launch:
    return Launch(
        role=Role.KERNEL, name=name, kind="poi", node=name, parts=(name,), ops=(f"aten.{op}",),
        reads=reads, writes=writes, lines=(LINE,),
    )  # fmt: skip


def graph(*launches: Launch, refused: tuple[str, ...] = ("exceeds max fusion",), **fields: Any) -> GraphManifest:
    names = [launch.name for launch in launches]
    pairs = [
        Pair(first=one, second=other, score=None, is_allowed=None, refused=refused) for one, other in pairwise(names)
    ]
    decisions = Decisions(
        before=(), after=(), pairs=tuple(pairs), fused=(), num_rounds=1,
        ops=Totals(kernels=2, bytes=0), outputs=(),
    )  # fmt: skip
    known = {"compile_id": "0/0", "phase": "forward", "is_aligned": True, "decisions": decisions, **fields}
    return GraphManifest(launches=launches, **known)


def manifest(*graphs: GraphManifest) -> Manifest:
    return Manifest(torch="2.13.0+cpu", triton="", device="cpu", settings={}, graphs=graphs)


ONE = manifest(graph(kernel("op0_op1", {"x": 100}, {"y": 100}, op="relu sin")))
TWO = manifest(graph(kernel("op0", {"x": 100}, {"t": 100}), kernel("op1", {"t": 100}, {"y": 100}, op="sin")))


def says(found: baselines.Outcome) -> list[str]:
    return [one.text for one in found.regressions]


def test_a_kernel_more_is_a_regression_with_the_pair_the_reason_and_the_line() -> None:
    (found,) = compare(baseline_of(ONE), TWO).regressions
    assert found.text == (
        "graph 0 forward: 2 kernel launches instead of 1, 400 bytes instead of 200; poi relu and poi sin are two "
        "launches: size limit: the kernel would hold too many nodes; try: config.max_fusion_size (64)"
    )
    assert found.line == LINE


def test_a_miss_that_the_baseline_knows_is_not_named() -> None:
    known = baseline_of(TWO).graphs[0].model_copy(update={"launches": {"kernel": 1}})
    (found,) = compare(baseline_of(TWO).model_copy(update={"graphs": (known,)}), TWO).regressions
    assert found.reasons == ()


@pytest.mark.parametrize(("bytes_", "is_worse"), [(104, False), (106, True)])
def test_bytes_may_grow_by_a_twentieth(bytes_: int, is_worse: bool) -> None:
    grown = manifest(graph(kernel("op0_op1", {"x": bytes_}, {"y": bytes_}, op="relu sin")))
    assert compare(baseline_of(ONE), grown).is_worse == is_worse


def test_names_do_not_count() -> None:
    renamed = manifest(graph(kernel("op7", {"arg": 100}, {"out": 100}, op="relu sin")))
    assert compare(baseline_of(ONE), renamed) == baselines.Outcome()


BACKWARD = ONE.graphs[0].model_copy(update={"phase": "backward"})


@pytest.mark.parametrize("others", [(*ONE.graphs, BACKWARD, *ONE.graphs), ONE.graphs, (BACKWARD, *ONE.graphs)])
def test_only_the_same_graphs_are_compared_and_a_run_without_its_backward_does_not_become_the_baseline(
    others: tuple[GraphManifest, ...],
) -> None:
    trained = baseline_of(manifest(*ONE.graphs, BACKWARD))
    found = compare(trained, manifest(*others))
    assert found.why_not.endswith(" forward, backward")
    assert (found.regressions, found.better) == ((), None)


def test_a_setting_that_is_on_is_not_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def seen(graph: GraphManifest, settings: Mapping[str, str] | None = None) -> tuple[Missed, ...]:
        asked.append(settings)
        return ()

    monkeypatch.setattr(baselines, "missed_fusions", seen)
    limit = baseline_of(ONE)
    compare(limit, TWO.model_copy(update={"settings": {"a": "b"}}))
    assert asked[-1] == {"a": "b"}


def test_what_is_better_leaves_the_baseline_and_nothing_enters_it() -> None:
    better = compare(baseline_of(TWO), ONE).better
    assert better is not None
    assert better.graphs == (GraphBaseline(phase="forward", launches={"kernel": 1}, bytes=200),)
    assert compare(better, TWO).is_worse


def test_what_is_worse_in_one_graph_tightens_no_other() -> None:
    assert compare(baseline_of(manifest(*TWO.graphs, *ONE.graphs)), manifest(*ONE.graphs, *TWO.graphs)).better is None


def test_launches_that_are_not_known_are_not_compared() -> None:
    cached = manifest(graph(is_aligned=False, why_not_aligned="from a cache", decisions=None))
    assert compare(baseline_of(ONE), cached).why_not == "graph 0/0 forward: from a cache"
    assert compare(baseline_of(ONE), manifest()).why_not
    with pytest.raises(ConfigError, match="graph 0/0 forward: from a cache"):
        baseline_of(cached)


def test_a_different_torch_or_architecture_is_refused(tmp_path: Path) -> None:
    baseline = baseline_of(ONE)
    baselines.check_same_build(baseline, torch="2.13.0+cu130", triton="3.9.0", device="cpu", path=tmp_path)
    for build in ({"torch": "2.11.0", "device": "cpu"}, {"torch": "2.13.0", "device": "sm_90"}):
        build["triton"] = "3.9.0"
        with pytest.raises(ConfigError, match=r"torch 2\.13\.0 on cpu, "):
            baselines.check_same_build(baseline, path=tmp_path, **build)


def test_on_a_gpu_a_different_triton_is_refused(tmp_path: Path) -> None:
    baseline = baseline_of(ONE.model_copy(update={"device": "sm_90", "triton": "3.9.0"}))
    build = {"torch": "2.13.0", "device": "sm_90", "path": tmp_path}
    baselines.check_same_build(baseline, triton="3.9.0", **build)
    with pytest.raises(ConfigError, match=r"Triton 3\.9\.0 on sm_90, .*Triton 3\.10\.0"):
        baselines.check_same_build(baseline, triton="3.10.0", **build)


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ({"norm": "01"}, ""),
        ({"norm": "02"}, "fast path norm has source 02, and in the baseline 01: make the baseline again"),
        ({}, "this program does not call fast path norm, unlike that of the baseline: make the baseline again"),
        ({"norm": "01", "gelu": "1"}, "this program calls fast path gelu, unlike that of the baseline"),
    ],
)
def test_fast_paths_of_a_different_source_are_not_compared(sources: dict[str, str], why: str) -> None:
    baseline = baseline_of(ONE.model_copy(update={"sources": {"norm": "01"}}))
    found = compare(baseline, ONE.model_copy(update={"sources": sources})).why_not
    assert found.startswith(why) and bool(found) == bool(why)


def test_settings_that_differ_are_the_last_reason_of_a_regression() -> None:
    (found,) = compare(baseline_of(ONE), TWO.model_copy(update={"settings": {"max_fusion_size": "1"}})).regressions
    assert found.reasons[-1].endswith("max_fusion_size default / 1")


def test_the_fast_paths_of_a_manifest_are_those_whose_op_or_kernel_its_graphs_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def path(**names: Any) -> Any:
        return SimpleNamespace(source=SimpleNamespace(sha256="01", **{"ops": set(), "kernels": set(), **names}))

    known = {"op": path(ops={"mine::norm"}), "kernel": path(kernels={"mine.scale_kernel"}), "none": path()}
    monkeypatch.setattr(recorder, "registered", lambda: known)
    calls = [kernel(name, {}, {}) for name in ("torch.ops.mine.norm.default", "scale_kernel_0", "triton_poi_fused_0")]
    assert recorder.sources_of([graph(*calls)]) == {"op": "01", "kernel": "01"}
    assert recorder.sources_of([graph(calls[2])]) == {}


def test_a_file_is_a_baseline_or_one_line_says_why_not(tmp_path: Path) -> None:
    path = tmp_path / "fusion.json"
    baselines.write(baseline_of(ONE), path)
    assert baselines.read(path) == baseline_of(ONE)
    for text, why in {
        "{": "is damaged: it is not JSON",
        "[]": "holds a list, not an object",
        '{"schema_version": 2, "torch": "2.13.0"}': "as a baseline, device: Field required",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=why):
            baselines.read(path)


CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.mark.parametrize("preset", ["llama8b", "wan14b", "wan14b_256", "wan14b_8", "wan21_14b"])
def test_each_preset_for_gpus_has_a_baseline_that_says_how_it_was_made(preset: str) -> None:
    assert (CONFIGS / f"{preset}.yaml").exists()
    (path,) = (CONFIGS / "fusion").glob(f"{preset}-*sm_90.json")
    found = baselines.read(path)
    assert (found.torch, found.device) == ("2.11.0", "sm_90")
    assert f"--preset {preset} " in found.made_with and "/" not in found.made_with.split("RUN")[0]
    assert all(graph.launches["kernel"] and graph.bytes for graph in found.graphs)


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"nowhere/fusion\.json: "):
        baselines.write(baseline_of(ONE), tmp_path / "nowhere" / "fusion.json")


def node(kind: str) -> Node:
    empty: Any = {"parts": (), "ops": (), "body": {}, "loops": "", "reads": {}, "writes": {}}
    return Node(name=kind, kind=kind, device="cpu", fx=(), lines=(), **empty)


def test_the_cpp_backend_ends_a_kernel_at_a_result_of_a_library_call_and_not_at_a_node_without_code() -> None:
    """As in the backward of attention, where results are taken apart between pointwise nodes."""
    kinds = ("extern", "output", "pointwise", "nop", "reduction", "output", "pointwise", "collective", "wait")
    groups = [(role, [one.kind for one in nodes]) for role, nodes in _as_launched(list(map(node, kinds)))]
    assert groups == [
        (Role.EXTERN, ["extern"]),
        (Role.KERNEL, ["pointwise", "reduction"]),
        (Role.KERNEL, ["pointwise"]),
        (Role.COLLECTIVE, ["collective"]),
        (Role.WAIT, ["wait"]),
    ]
