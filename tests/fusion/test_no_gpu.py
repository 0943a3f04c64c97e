"""Code for a GPU on a machine without one, in a process of its own."""

from __future__ import annotations

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
RECORD = ("-m", "tpcompile", "fusion", "record", "tests.fusion.models:feed_forward", "--nproc", "4")


def recorded(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *RECORD, "-o", str(folder / "manifest.json"), *flags]
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
    ended = recorded(folder, "--arch", "sm_90", "--set", "train=1")
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


def test_an_unknown_architecture_is_one_line_with_those_that_are_known(tmp_path: Path) -> None:
    ended = recorded(tmp_path, "--arch", "sm_1")
    assert (ended.returncode, ended.stderr) == (2, "error: --arch sm_1: known are sm_90, sm_80\n")


def test_a_process_that_has_torch_already_is_refused() -> None:
    import torch  # noqa: F401

    with pytest.raises(ConfigError, match="torch is imported already"):
        no_gpu.pretend("sm_90")
