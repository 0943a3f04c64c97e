"""scripts/bench_decoding.py: a small model on two ranks, and what is wrong with a row; large ones by hand, on GPUs."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.bench_decoding import equal_tokens, is_wrong, memory_line, shown, tokens_per_s
from tests.forked import run_python

NEW = 4
QUICK = ("--device", "cpu", "--small", "--layers", "1", "--backend", "eager", "--prompt", "4", "--new", str(NEW))
PROGRAMS = ("eager", "ours", "transformers")


def decoding(module: str, folder: Path) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Exit code, output, rows; no process is left running."""
    given = ("--dtype", "float32", "--programs", ",".join(PROGRAMS), "--rounds", "2", "--logs", folder / "logs")
    file = folder / "report.json"
    ended = run_python(["-m", "tests.bench.forked", module, *QUICK, *given, "--json", file])
    assert ended.left_running == ()
    output = ended.stdout + ended.stderr
    assert file.is_file(), output
    return ended.returncode, output, {row["name"]: row for row in json.loads(file.read_text())["rows"]}


@pytest.mark.slow
def test_all_programs_have_the_tokens_of_eager_and_one_region_per_token(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, output, rows = decoding("scripts.bench_decoding", tmp_path)
    assert code == 0, output
    assert {name: (row["equal"], row["regions_per_token"]) for name, row in rows.items()} == {
        "eager": (NEW, 0), "ours": (NEW, 1), "transformers": (NEW, 1),
    }  # fmt: skip
    for name, row in rows.items():
        assert row["ready_s"] > 0 and row["prompt_ms"] > 0
        stages = [line.split(f"{name}: ")[1] for line in output.splitlines() if f" s  {name}: " in line]
        assert [stage.split()[-1] for stage in stages[:3]] == ["built", "compiled", "ready"]
        assert sum("tokens/s" in stage for stage in stages) == 2


@pytest.mark.slow
def test_different_tokens_of_ours_fail_the_run_and_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, output, rows = decoding("tests.bench.decoding", tmp_path)
    assert code == 1, output
    assert rows["ours"]["equal"] < NEW == rows["eager"]["equal"]
    assert re.findall(r"rank \d|-\d+", rows["transformers"]["why_not"]) == ["rank 1", "-9"]


@pytest.mark.parametrize(
    ("name", "changed", "dtype", "wrong"),
    [
        ("ours", {}, "float32", False),
        ("ours", {"equal": NEW - 1}, "float32", True),
        ("ours", {"equal": None}, "float32", True),
        ("ours", {"equal": NEW - 1}, "bfloat16", False),
        ("ours", {"why_not": "rank 1 died"}, "bfloat16", True),
        ("transformers", {"why_not": "rank 1 died"}, "float32", False),
        ("transformers", {"equal": 0}, "float32", False),
    ],
)
def test_only_ours_can_be_wrong_and_tokens_only_where_no_rounding_decides(
    name: str, changed: dict[str, Any], dtype: str, wrong: bool
) -> None:
    row = {"name": name, "why_not": "", "equal": NEW} | changed
    assert is_wrong(row, argparse.Namespace(dtype=dtype, new=NEW)) is wrong


@pytest.mark.parametrize(
    ("all_s", "rate", "text"), [(2.5, 60.0, "60.0 tokens/s"), (0.5, None, "- tokens/s"), (0.4, None, "- tokens/s")]
)
def test_a_round_has_the_rate_of_the_tokens_behind_the_first_unless_it_is_noise(
    all_s: float, rate: float | None, text: str
) -> None:
    found = tokens_per_s({"all_s": all_s, "first_s": 0.5}, 120)
    assert found == rate
    row = {"name": "ours", "why_not": "", "tokens_per_s": found, "prompt_ms": 1, "regions_per_token": 1, "equal": 4}
    assert text in shown(row)


@pytest.mark.parametrize(
    ("found", "number"), [([[1, 2, 3], [4, 5, 6]], 3), ([[1, 2, 3], [4, 5, 0]], 2), ([[0, 2, 3], [4, 5, 0]], 0)]
)
def test_equal_tokens_end_at_the_first_that_differs_in_any_sequence(found: list[list[int]], number: int) -> None:
    assert equal_tokens(found, [[1, 2, 3], [4, 5, 6]]) == number


def test_memory_is_that_of_each_program_and_the_most_that_was_in_use() -> None:
    first = {"name": "eager", "peak_gb": 8.25, "device_gb": (9.5, 80.0)}
    last = {"name": "ours", "peak_gb": 8.5, "device_gb": (19.5, 80.0)}
    line = memory_line([first, {"name": "transformers"}, last])
    assert "eager 8.25, ours 8.50;" in line and line.endswith(" 19.5 of 80.0 GB") and "transformers" not in line
    assert "eager" not in memory_line([{"name": "eager", "peak_gb": None}])


class BeforeTheRename:
    def forward(self, input_ids: object, past_key_values: object = None) -> None: ...


class AfterTheRename:
    def forward(self, input_ids: object, cache: object = None) -> None: ...


@pytest.mark.parametrize(("model", "name"), [(BeforeTheRename(), "past_key_values"), (AfterTheRename(), "cache")])
def test_a_cache_is_given_by_the_name_that_the_model_has_for_it(model: object, name: str) -> None:
    from scripts.decoding_ranks import cache_argument

    assert cache_argument(model) == name
