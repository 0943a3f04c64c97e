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
    found = {"is_gpu": True, "backend": "inductor"} | place
    return names.why_not(Name.of(name), config.load(preset, list(overrides)).block, **found)


def test_a_name_is_a_base_and_variants() -> None:
    found = Name.of("C+fast:max-autotune:graphed")
    assert (found.base, found.variants, found.role) == ("C+fast", ("max-autotune", "graphed"), Role.OURS)
    assert found.is_alone


@pytest.mark.parametrize("place", ["package.module", "module", __file__])
def test_a_function_of_the_users_own_is_a_peer_and_takes_variants(place: str) -> None:
    found = Name.of(f"{place}:build:graphed")
    assert (found.base, found.variants, found.role) == (f"{place}:build", ("graphed",), Role.PEER)


@pytest.mark.parametrize("text", ["D", "C:fast", "C:graphed:graphed", "D:graphed", "package.module", "module:a b"])
def test_an_unknown_name_is_refused_with_those_that_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"C\+fast-all.*FILE:FUNCTION.*max-autotune"):
        Name.of(text)


def test_a_file_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py"):
        Name.of("nowhere.py:build")


def test_all_defaults_are_names_that_run_on_gpus() -> None:
    assert {name for name in DEFAULT if refusal(name, "wan14b_8")} == set()


@pytest.mark.parametrize(
    ("name", "preset", "place", "why"),
    [
        ("C:graphed", "cpu_smoke", {"is_gpu": False}, "needs GPUs"),
        ("C:one-shot:graphed", "wan14b", {}, "4680"),
        ("C:one-shot:by-size", "wan14b_8", {}, "two settings of the same sums"),
        ("C:by-size", "wan14b_8", {"is_gpu": False}, "needs GPUs"),
        ("A:graphed", "wan14b_8", {}, "breaks the graph"),
        ("C:max-autotune", "wan14b_8", {"backend": "aot_eager"}, "needs Inductor"),
    ],
)
def test_what_cannot_run_says_why(name: str, preset: str, place: dict[str, Any], why: str) -> None:
    assert why in refusal(name, preset, **place)
