"""Code for a GPU on a machine without one, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import PYTHONPATH
from tpcompile.errors import ConfigError
from tpcompile.fusion import no_gpu
from tpcompile.fusion.manifest import read
from tpcompile.fusion.records import Manifest, Role

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
COMMAND = ("-m", "tpcompile", "fusion", "record")
RECORD = (*COMMAND, "tests.fusion.models:feed_forward", "--nproc", "4")


def recorded(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *RECORD, "-o", str(folder / "manifest.json"), *flags)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    environ = {
        "PATH": "/usr/bin:/bin:/usr/local/bin",
        "HOME": str(folder),
        "PYTHONPATH": PYTHONPATH,
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("sm_90")
    ended = recorded(folder, "--arch", "sm_90", "--resources", "--set", "train=1")
    assert ended.returncode == 0, ended.stderr
    return read(folder / "manifest.json")


def test_a_sharded_model_has_triton_kernels_forward_and_backward(trained: Manifest) -> None:
    pytest.importorskip("triton")
    assert trained.device == "sm_90"
    assert [(graph.phase, graph.is_aligned) for graph in trained.graphs] == [("forward", True), ("backward", True)]
    forward, backward = ([one for one in graph.launches if one.role is not Role.WAIT] for graph in trained.graphs)
    kinds = [one.kind if one.role is Role.KERNEL else str(one.role) for one in forward]
    assert kinds == ["per", "extern", "extern", "poi", "extern", "collective", "per"]
    assert [one.role for one in backward].count(Role.COLLECTIVE) == 2


def test_what_keeps_the_norms_apart_is_the_collective(trained: Manifest) -> None:
    from tpcompile.fusion.why_not import missed_fusions

    (found,) = [one for one in missed_fusions(trained.graphs[0]) if one.places == (0, 7)]
    assert found.reason.boundary == "collective"
    assert "1 all_reduce_" in found.reason.text


def test_triton_kernels_have_registers_for_each_configuration(trained: Manifest) -> None:
    launches = [launch for graph in trained.graphs for launch in graph.launches]
    assert all(bool(one.resources) == (one.role is Role.KERNEL) for one in launches)
    norm = launches[0].resources
    assert [one.configuration.split()[0] for one in norm] == ["XBLOCK=1", "XBLOCK=8", "XBLOCK=32"]
    assert norm[0].registers < norm[1].registers < norm[2].registers
    assert all(one.shared_bytes > 0 for one in norm)  # the warps of a block exchange their sums


PROGRAM = """
import json
from tpcompile.fusion.no_gpu import pretend
pretend("sm_90")
import triton
from torch._inductor.codecache import PyCodeCache
from tpcompile.fusion import resources, targets
from tpcompile.torch_api import resources as of

large = targets.record_without_gpu("tests.fusion.models:softmax", ["rows=ROWS"])
with resources.generated_codes() as codes:
    targets.record_without_gpu("tests.fusion.models:feed_forward")
(name, source), *_ = resources.triton_sources(codes[0]).items()
of.of_source(source, name)
kernel = getattr(PyCodeCache.load(source), name)
print(json.dumps({
    "bytes": [sum(one.bytes for one in graph.launches) for graph in large.graphs],
    "spills": [of._compiled(kernel, triton.Config({"XBLOCK": block}, num_warps=1))[0]["spills"] for block in (1, 256)],
}))
"""
ROWS = 2**18
"""Of 4096: 2^30 elements."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What the functions behind the command give, in one process: a start of torch costs more than they do."""
    pytest.importorskip("triton")
    ended = run(tmp_path_factory.mktemp("program"), "-c", PROGRAM.replace("ROWS", str(ROWS)))
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(ended.stdout))


def test_bytes_are_those_of_whole_buffers_beyond_the_elements_that_inductor_counts(found: dict[str, list[int]]) -> None:
    assert found["bytes"] == [2 * ROWS * 4096 * 2]


def test_a_configuration_with_too_large_a_block_spills(found: dict[str, list[int]]) -> None:
    fitting, too_large = found["spills"]
    assert fitting == 0 < too_large


def test_resources_without_an_architecture_are_refused(tmp_path: Path) -> None:
    ended = recorded(tmp_path, "--resources")
    assert ended.returncode == 2
    assert ended.stderr == "error: --resources is for --arch; on a GPU they are recorded without it\n"


def test_an_unknown_architecture_is_one_line_with_those_that_are_known(tmp_path: Path) -> None:
    ended = recorded(tmp_path, "--arch", "sm_1")
    assert (ended.returncode, ended.stderr) == (2, "error: --arch sm_1: known are sm_90, sm_80\n")


def test_a_process_that_has_torch_already_is_refused() -> None:
    import torch  # noqa: F401

    with pytest.raises(ConfigError, match="torch is imported already"):
        no_gpu.pretend("sm_90")
