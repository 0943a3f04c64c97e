"""repro/fusion/walk_through.py without a GPU: its numbers, what it says of matmuls, and the three failures."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.forked import PYTHONPATH, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
FUSED_BY_DEFAULT = (
    "pointwise and pointwise", "pointwise and reduction", "reduction and pointwise (norm)", "residual and norm",
    "two reductions of one input", "softmax", "embedding and add", "casts", "transpose and pointwise",
)  # fmt: skip
FUSED_BY_A_TEMPLATE = ("matmul and relu", "matmul and silu")
NEVER = ("pointwise and matmul", "norm and matmul", "matmul and matmul")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("triton")
    home = tmp_path_factory.mktemp("home")
    environ = {"PATH": "/usr/bin:/bin:/usr/local/bin", "HOME": str(home), "PYTHONPATH": PYTHONPATH}
    program = ROOT / "repro" / "fusion" / "walk_through.py"
    command = [sys.executable, str(program), "--json"]
    ended = subprocess.run(command, env=environ, cwd=home, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


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
