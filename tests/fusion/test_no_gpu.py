"""Code for a GPU on a machine without one: `fusion record --arch`, and the walk-through and known misses of repro/."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import PYTHONPATH, ROOT, Ended, run_python
from tpcompile.errors import ConfigError
from tpcompile.fusion import no_gpu
from tpcompile.fusion.manifest import read
from tpcompile.fusion.manifest_records import Manifest, Role

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(900)]
"""The first test runs all programs."""
RECORD = ("record", "tests.fusion.models:feed_forward", "--nproc", "4")
IS_2_11 = torch.__version__.startswith("2.11.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("no_gpu")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, dict[str, Any]]:
    """How each program ended: all of them from one process, since its start costs more than they do."""
    pytest.importorskip("triton")
    program = folder / "program.py"
    program.write_text(PROGRAM.replace("ROWS", str(ROWS)))
    advised = folder / "advised.py"
    advised.write_text(ADVISED)
    manifest = ("-o", folder / "manifest.json", "--arch", "sm_90", "--resources", "--set", "train=1")
    on_cpu = ("-o", folder / "on_cpu.json", "--arch", "sm_90")
    commands = {
        "record": ("-m", "tpcompile.fusion", *RECORD, *manifest),
        "on cpu": ("-m", "tpcompile.fusion", "record", "tests.fusion.models:on_cpu", *on_cpu),
        "of no tensors": ("-m", "tpcompile.fusion", "record", "tests.fusion.models:of_no_tensors", *on_cpu),
        "program": (program,),
        "walk through": (ROOT / "repro/fusion/walk_through.py", "--json"),
        "advice": (advised,),
        "known misses": (ROOT / "repro/fusion/known_misses.py", "--json"),
    }
    words = {name: [str(word) for word in command] for name, command in commands.items()}
    environ = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # workers would import torch and have nothing to compile
    done = subprocess.run(
        [sys.executable, "-m", "tests.fusion.without_gpu", json.dumps(words)],
        env=environ | {"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def printed(ended: dict[str, dict[str, Any]], name: str, code: int = 0) -> Any:
    assert ended[name]["returncode"] == code, ended[name]["stderr"]
    return json.loads(ended[name]["stdout"])


@pytest.fixture(scope="module")
def trained(ended: dict[str, Any], folder: Path) -> Manifest:
    assert ended["record"]["returncode"] == 0, ended["record"]["stderr"]
    return read(folder / "manifest.json")


@pytest.fixture(scope="module")
def found(ended: dict[str, Any]) -> Any:
    """What the functions behind the command give."""
    return printed(ended, "program")


@pytest.fixture(scope="module")
def tables(ended: dict[str, Any]) -> Any:
    return printed(ended, "walk through")


@pytest.fixture(scope="module")
def rows(ended: dict[str, Any]) -> Any:
    return printed(ended, "known misses", code=1)


def test_a_sharded_model_has_triton_kernels_forward_and_backward(trained: Manifest) -> None:
    assert trained.device == "sm_90"
    assert [(graph.phase, graph.is_aligned) for graph in trained.graphs] == [("forward", True), ("backward", True)]
    forward, backward = ([one for one in graph.launches if one.role is not Role.WAIT] for graph in trained.graphs)
    kinds = [one.kind if one.role is Role.KERNEL else str(one.role) for one in forward]
    assert kinds == ["per", "extern", "extern", "poi", "extern", "collective", "per"]
    assert [one.role for one in backward].count(Role.COLLECTIVE) == 2


@pytest.mark.parametrize("name", ["on cpu", "of no tensors"])
def test_a_program_on_the_cpu_is_refused_with_its_device(name: str, ended: dict[str, Any], folder: Path) -> None:
    found = ended[name]
    assert found["returncode"] == 2, found["stderr"]
    line = found["stderr"].splitlines()[-1]
    assert re.search(f":{name.replace(' ', '_')} .*cpu, .*cuda", line)
    assert not (folder / "on_cpu.json").exists()


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


def test_bytes_are_those_of_whole_buffers_beyond_the_elements_that_inductor_counts(found: dict[str, list[int]]) -> None:
    assert found["bytes"] == [2 * ROWS * 4096 * 2]


def test_a_configuration_with_too_large_a_block_spills(found: dict[str, list[int]]) -> None:
    fitting, too_large = found["spills"]
    assert fitting == 0 < too_large


def refused(folder: Path, *flags: str) -> Ended:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return run_python(["-m", "tpcompile", "fusion", *RECORD, "-o", folder / "manifest.json", *flags], environ=environ)


def test_resources_without_an_architecture_are_refused(tmp_path: Path) -> None:
    ended = refused(tmp_path, "--resources")
    assert ended.returncode == 2
    assert re.fullmatch("error: --resources .*--arch; .*GPU.*\n", ended.stderr)


def test_an_unknown_architecture_is_one_line_with_those_that_are_known(tmp_path: Path) -> None:
    ended = refused(tmp_path, "--arch", "sm_1")
    assert ended.returncode == 2 and re.fullmatch("error: --arch sm_1: .*sm_90, sm_80\n", ended.stderr)


def test_a_process_that_has_torch_already_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--arch sm_90: .*already"):
        no_gpu.pretend("sm_90")


ADVISED = """
from tpcompile.fusion.no_gpu import pretend
pretend("sm_90")
from tests.advice import fused
fused.main()
"""


@pytest.fixture(scope="module")
def advised(ended: dict[str, Any]) -> Any:
    return printed(ended, "advice")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("aggressive", "config.aggressive_fusion with config.score_fusion_memory_threshold = 0"),
        ("threshold", "config.score_fusion_memory_threshold = 0"),
        ("size", "config.max_fusion_size"),
        ("custom op", "write it with torch's ops"),
        ("two matmuls", "put the operands that differ side by side"),
        ("template", "config.max_autotune_gemm"),
    ],
)
def test_what_is_proposed_makes_one_launch(name: str, says: str, advised: Any) -> None:
    as_it_is, followed = advised[name]
    assert as_it_is["missed"][0]["reason"]["remedy"].startswith(says)
    assert (len(as_it_is["launches"]) > 1, len(followed["launches"]), followed["missed"]) == (True, 1, [])


def test_nothing_is_proposed_where_it_does_not_help(advised: Any) -> None:
    """A reduction stays a launch of its own, whatever the settings."""
    for row in advised["a reduction"]:
        assert len(row["launches"]) == 2
        assert row["missed"][0]["reason"]["remedy"] == ""
    assert advised["before a matmul"][0]["missed"][0]["reason"]["remedy"] == ""


def test_bytes_are_saved_only_where_the_reason_does_not_deny_it(advised: Any) -> None:
    saved = {(name, one["saved_bytes"] > 0) for name, rows in advised.items() for one in rows[0]["missed"]}
    assert {name for name, is_saving in saved if not is_saving} == {"aggressive", "a reduction", "threshold"}
    for rows in advised.values():
        for one in (missed for row in rows for missed in row["missed"]):
            is_denied = "save no read" in one["reason"]["text"] or "too few bytes" in one["reason"]["text"]
            assert is_denied == (one["saved_bytes"] == 0), one


# repro/fusion/walk_through.py: its numbers, what it says of matmuls, and the three failures.

FUSED_BY_DEFAULT = (
    "pointwise and pointwise", "pointwise and reduction", "reduction and pointwise (norm)", "residual and norm",
    "two reductions of one input", "softmax", "embedding and add", "casts", "transpose and pointwise",
)  # fmt: skip
FUSED_BY_A_TEMPLATE = ("matmul and relu", "matmul and silu")
NEVER = ("pointwise and matmul", "norm and matmul", "matmul and matmul")


@pytest.mark.parametrize(
    ("name", "kernels", "ratio", "kind"),
    [
        ("pointwise: sigmoid(x * y + z)", (3, 1, 1), 2.0, "poi add mul sigmoid"),
        ("reduction: (x * y + z).sum(-1)", (3, 1, 1), 2.33, "per add mul sum"),
        ("horizontal: x.sin(), x.cos()", (2, 2, 1), 1.33, "poi cos sin"),
    ],
)
def test_the_introductions_are_one_kernel(
    name: str, kernels: tuple[int, ...], ratio: float, kind: str, tables: dict[str, Any]
) -> None:
    """sigmoid(x * y + z): 8 operands in memory for three kernels, 4 for one."""
    row = tables["programs"][name]
    assert (row["ops"], row["nodes"], row["launches"]) == kernels
    assert row["bytes of ops"] / row["bytes"] == pytest.approx(ratio, abs=0.01)
    assert row["kinds"] == [kind]


def test_the_feed_forward_is_five_launches_and_four_with_templates(tables: dict[str, Any]) -> None:
    """Not 3: the norm is a reduction, which no matmul template takes in, and two matmuls never merge."""
    default, tuned = (tables["programs"][f"feed-forward, {mode}"]["kinds"] for mode in ("default", "max-autotune"))
    assert default[0] == tuned[0] == "red native_layer_norm"
    assert default[1:] == ["extern_kernels.addmm", "extern_kernels.addmm", "poi mul silu", "extern_kernels.addmm"]
    assert tuned[1:] == ["tem addmm", "tem addmm mul silu", "tem addmm"]


def launches(tables: dict[str, Any], rules: tuple[str, ...]) -> set[tuple[int, int]]:
    """What the default makes of these rules, and max-autotune."""
    programs = tables["programs"]
    modes = ("default", "max-autotune")
    return {tuple(programs[f"{rule}, {mode}"]["launches"] for mode in modes) for rule in rules}  # type: ignore[misc]


def test_what_each_mode_fuses(tables: dict[str, Any]) -> None:
    assert launches(tables, FUSED_BY_DEFAULT) == {(1, 1)}
    assert launches(tables, FUSED_BY_A_TEMPLATE) == {(2, 1)}
    assert launches(tables, NEVER) == {(2, 2)}


def test_each_failure_has_its_class_and_its_repair_none(tables: dict[str, Any]) -> None:
    found = {name: (row["class"], row["repaired"]) for name, row in tables["failures"].items()}
    assert found == {
        "a graph break": ("overhead", "none"),
        "a reduction that does not follow the memory": ("fusion", "none"),
        "a setting of the code generator": ("codegen", "none"),
    }
    why = tables["failures"]["a reduction that does not follow the memory"]["why"]
    assert why.startswith("indexing: ")


# repro/fusion/known_misses.py: this torch has them or not, and each is named with pair, reason and setting.


def only(row: dict[str, Any]) -> dict[str, Any]:
    (missed,) = row["missed"]
    assert {line["file"].rsplit("/", 1)[-1] for line in missed["lines"]} == {"missed_programs.py"}
    return dict(missed)


def test_vllm_27699_a_matmul_and_its_reduce_scatter_are_apart_and_async_tp_is_named(rows: Any) -> None:
    found = only(rows["vLLM 27699"])
    assert found["reason"]["boundary"] == "collective"
    assert "config._micro_pipeline_tp" in found["reason"]["remedy"]


def test_vllm_27699_with_async_tp_what_lies_between_two_matmuls_stays_one_kernel(rows: Any) -> None:
    """The issue lost this fusion with torch 2.9; were it lost again, these would be more launches."""
    row = rows["vLLM 27699, async TP"]
    assert row["missed"] == []
    assert len(row["launches"]) == 3
    assert {"aten.add", "aten.clamp", "aten.reciprocal"} <= set(row["launches"][1].split())


def test_nemo_2987_async_tp_is_on_and_took_nothing_because_of_bmm(rows: Any) -> None:
    found = only(rows["NeMo 2987"])
    assert found["reason"]["text"].endswith(" bmm")
    assert "F.linear" in found["reason"]["remedy"]
    assert "enable_symm_mem_for_group" in only(rows["NeMo 2987, no symmetric memory"])["reason"]["remedy"]


def test_nemo_2987_what_is_proposed_helps(rows: Any) -> None:
    assert rows["NeMo 2987, mm"] == {"launches": ["symm_mem.fused_all_gather_matmul", "aten.relu"], "missed": []}


def test_pytorch_161138_a_reduction_in_two_stages_and_what_is_proposed_helps(rows: Any) -> None:
    row = rows["pytorch 161138"]
    assert len(row["launches"]) == 4
    found = only(row)
    assert found["reason"]["boundary"] == "stages of a reduction"
    assert "config.triton.cooperative_reductions" in found["reason"]["remedy"]
    assert "numel/rnumel mismatch" in found["logged"][0]
    cooperative = rows["pytorch 161138, cooperative"]
    assert cooperative == {"launches": ["zero_", "aten.abs aten.max aten.mean aten.pow"], "missed": []}


@pytest.mark.skipif(not IS_2_11, reason="torch 2.13 makes one kernel in either order")
def test_pytorch_142316_the_limit_that_put_a_product_into_memory_is_named(rows: Any) -> None:
    found = only(rows["pytorch 142316"])
    assert re.search(r" 5 reads, .* 4$", found["reason"]["text"])
    assert "config.realize_reads_threshold" in found["reason"]["remedy"]


def test_pytorch_142316_is_one_kernel_with_that_limit_in_a_different_order_and_with_a_newer_torch(rows: Any) -> None:
    number = {name: len(row["launches"]) for name, row in rows.items()}
    assert number["pytorch 142316, limit"] == number["pytorch 142316, different order"] == 1
    assert number["pytorch 142316"] == 1 + IS_2_11
