"""Two manifests: what differs, its class, and why a kernel was split."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.fusion import codegen
from tests.fusion.zoo import ZOO, Program
from tpcompile.errors import ConfigError
from tpcompile.fusion import manifest_text
from tpcompile.fusion.diff import WORDS, Change, diff
from tpcompile.fusion.manifest import read, write
from tpcompile.fusion.manifest_records import Call, GraphManifest, Launch, Manifest, Resources, Role
from tpcompile.fusion.reasons import reason_of

pytestmark = pytest.mark.slow
FEED_FORWARD = ZOO["feed-forward"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return recorded(FEED_FORWARD, tmp_path_factory.mktemp("base"))


def recorded(program: Program, cache: Path) -> Manifest:
    """With a cache of its own: two ranks, or two commits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        return codegen.recorded(program)


def changed(**options: object) -> Program:
    return Program(**{**vars(FEED_FORWARD), "options": options})


def text(found: object) -> str:
    return "\n".join(line.plain for line in manifest_text.difference(found))  # type: ignore[arg-type]


def test_equal_programs_have_no_difference(base: Manifest, tmp_path: Path) -> None:
    found = diff(base, recorded(FEED_FORWARD, tmp_path))
    assert found.change is Change.NONE
    assert text(found) == WORDS[Change.NONE]


def test_manifests_of_different_devices_are_not_compared(base: Manifest) -> None:
    of_gpu = base.model_copy(update={"device": "sm_90"})
    for across_versions in (False, True):
        with pytest.raises(ConfigError, match=r" cpu, .* sm_90"):
            diff(base, of_gpu, across_versions=across_versions)


def test_a_limit_on_one_rank_is_a_split_with_its_pair_reason_and_knob(base: Manifest, tmp_path: Path) -> None:
    found = diff(base, recorded(changed(max_fusion_size=2), tmp_path))
    assert found.change is Change.FUSION
    splits = [split for graph in found.graphs for split in graph.splits]
    assert splits, text(found)
    reasons = {one.reason.text for split in splits for one in split.why}
    assert reason_of("exceeds max fusion").text in reasons
    assert "config.max_fusion_size" in text(found)


def test_different_code_for_the_same_kernels_is_codegen(base: Manifest, tmp_path: Path) -> None:
    found = diff(base, recorded(changed(**{"cpp.threads": 3, "cpp.min_chunk_size": 1}), tmp_path))
    assert found.change is Change.CODEGEN
    assert "different code: cpp_fused" in text(found)


def test_a_graph_more_is_overhead(base: Manifest) -> None:
    more = base.model_copy(update={"graphs": (*base.graphs, base.graphs[0])})
    found = diff(base, more)
    assert found.change is Change.OVERHEAD
    assert found.new == ("0/0 forward",)
    assert diff(more, base).missing == ("0/0 forward",)


def test_a_library_call_that_became_a_template_is_a_choice() -> None:
    call = Call(role=Role.EXTERN, name="extern_kernels.mm", kind="extern_kernels")
    template = Call(role=Role.KERNEL, name="triton_tem_fused_mm_0", kind="tem")
    assert diff(manifest_of(call), manifest_of(template)).change is Change.CHOICE


def manifest_of(call: Call) -> Manifest:
    launch = Launch(**call.model_dump())
    graph = GraphManifest(compile_id="0/0", phase="forward", is_aligned=True, launches=(launch,), decisions=None)
    return Manifest(torch="2.13", triton="none", device="cpu", settings={}, graphs=(graph,))


def test_manifests_of_different_versions_are_refused_unless_asked_for(base: Manifest) -> None:
    other = base.model_copy(update={"torch": "2.11.0"})
    with pytest.raises(ConfigError, match=r" torch 2\..*2\.11\.0.*--across-versions"):
        diff(base, other)
    assert diff(base, other, across_versions=True).change is Change.NONE


def test_a_file_gives_the_manifest_that_was_written(base: Manifest, tmp_path: Path) -> None:
    write(base, tmp_path / "manifest.json")
    assert read(tmp_path / "manifest.json") == base


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ('{"schema_version": 99}', "schema version 99, and this reads 4"),
        ("[]", "holds a list, not an object"),
    ],
)
def test_a_file_that_is_no_manifest_is_one_line(content: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=says):
        read(path)


def test_launches_in_order_fit_into_100_columns(base: Manifest) -> None:
    lines = [line.plain for line in manifest_text.manifest(base, num_missed=2)]
    launched = [line for line in lines if "█" in line]
    assert [len(graph.launches) for graph in base.graphs] == [5, 8]
    assert len(launched) == 13
    assert max(map(len, launched)) <= 100
    assert torch.__version__ in lines[0]


def by_hand(*launches: Launch) -> Manifest:
    return of_graphs(launches)


def of_graphs(*launches_of: tuple[Launch, ...]) -> Manifest:
    graphs = []
    for number, launches in enumerate(launches_of):
        place = {"compile_id": f"{number}/0", "phase": "forward"}
        graphs.append(GraphManifest(**place, is_aligned=True, launches=launches, decisions=None))
    return Manifest(torch="2.13.0", triton="", device="sm_90", settings={}, graphs=tuple(graphs))


def test_a_copy_more_between_the_same_kernels_is_work_of_the_wrapper() -> None:
    kernel = Launch(role=Role.KERNEL, name="triton_poi_fused_add_0", kind="poi", ops=("aten.add",))
    copy = Launch(role=Role.COPY, name="copy_", kind="copy")
    assert diff(by_hand(kernel), by_hand(kernel, copy)).change is Change.WRAPPER
    assert diff(by_hand(kernel), by_hand(kernel, kernel, copy)).change is Change.FUSION


def test_of_several_graphs_the_class_that_says_most_is_the_programs() -> None:
    kernel = Launch(role=Role.KERNEL, name="triton_poi_fused_add_0", kind="poi", ops=("aten.add",), source="a")
    copy = Launch(role=Role.COPY, name="copy_", kind="copy")
    call = Launch(role=Role.EXTERN, name="extern_kernels.mm", kind="extern_kernels")
    template = Launch(role=Role.KERNEL, name="triton_tem_fused_mm_0", kind="tem")
    from_least_to_most = [
        (Change.NONE, (kernel,), (kernel,)),
        (Change.CODEGEN, (kernel,), (kernel.model_copy(update={"source": "b"}),)),
        (Change.WRAPPER, (kernel,), (kernel, copy)),
        (Change.FUSION, (kernel,), (kernel, kernel)),
        (Change.CHOICE, (call,), (template,)),
    ]
    for (_, *less), (change, *more) in pairwise(from_least_to_most):
        for one, other in ((less, more), (more, less)):
            assert diff(*map(of_graphs, one, other)).change is change


def test_a_configuration_that_timing_chose_is_said_and_is_no_difference() -> None:
    def tuned(configuration: str, registers: int) -> Manifest:
        needs = Resources(configuration=configuration, registers=registers, spills=0, shared_bytes=0)
        return by_hand(Launch(role=Role.KERNEL, name="triton_poi_fused_add_0", kind="poi", resources=(needs,)))

    found = diff(tuned("XBLOCK=512", 15), tuned("XBLOCK=1024", 23))
    assert found.change is Change.NONE
    assert "triton_poi_fused_add_0: XBLOCK=512, 15 registers -> XBLOCK=1024, 23 registers" in text(found)
    assert diff(tuned("XBLOCK=512", 15), tuned("XBLOCK=512", 15)).tuned == ()
