"""Names of programs, and which of them a machine and a preset cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from tpcompile import config
from tpcompile.bench import names
from tpcompile.bench.names import DEFAULT, Name
from tpcompile.bench.records import Role
from tpcompile.errors import ConfigError


def refusal(name: str, preset: str, *overrides: str, **place: Any) -> str:
    found = {"is_gpu": True, "backend": "inductor", "train": False, "tp": 2} | place
    return names.why_not(Name.of(name), config.load(preset, list(overrides)).block, **found)


def test_a_name_is_a_base_and_variants() -> None:
    found = Name.of("C+fast:max-autotune:graphed")
    assert (found.base, found.variants, found.role) == ("C+fast", ("max-autotune", "graphed"), Role.OURS)
    assert found.is_alone
    assert found.has_one_graph


def test_a_function_of_the_users_own_is_a_peer() -> None:
    found = Name.of("package.module:build")
    assert (found.role, found.is_own, found.has_one_graph) == (Role.PEER, True, False)


@pytest.mark.parametrize("text", ["D", "C:fast", "C:graphed:graphed", "module:build", "package.module"])
def test_an_unknown_name_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"dtensor_sp.*max-autotune"):
        Name.of(text)


def test_all_defaults_are_names_and_most_of_them_run_on_gpus() -> None:
    refused = {name for name in DEFAULT if refusal(name, "wan14b_8")}
    assert refused == {"transformers", "transformers:graphed"}


@pytest.mark.parametrize(
    ("name", "preset", "place", "why"),
    [
        ("C:graphed", "cpu_smoke", {"is_gpu": False}, "needs GPUs"),
        ("C:one-shot:graphed", "wan14b", {}, "4680"),
        ("C:one-shot:by-size", "wan14b_8", {}, "two settings of the same sums"),
        ("C:by-size", "wan14b_8", {"is_gpu": False}, "needs GPUs"),
        ("A:graphed", "wan14b_8", {}, "breaks the graph"),
        ("async_tp", "wan14b_8", {"backend": "aot_eager"}, "needs Inductor"),
        ("dtensor", "wan21_14b", {}, "norm=layer"),
        ("hooks", "wan14b_8", {"train": True}, "inference"),
        ("dtensor_sp", "wan14b_8", {"tp": 16}, "divides"),
        ("transformers", "wan14b_8", {}, "llama8b"),
    ],
)
def test_what_cannot_run_says_why(name: str, preset: str, place: dict[str, Any], why: str) -> None:
    assert why in refusal(name, preset, **place)
