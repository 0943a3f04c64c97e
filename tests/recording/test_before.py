"""recording/before: what the program had set when a recording begins, with the lines that set it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tpcompile.recording import before
from tpcompile.recording.before import set_before

CHUNK = 6  # of the module


@dataclass
class Config:
    width: int = 8
    names: tuple[str, ...] = ("a", "b")
    inner: Any = field(default_factory=lambda: SimpleNamespace(dtype=torch.float16))


class Odd:
    """Whatever is asked of it fails, and is noted."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        Odd.asked.append(name)
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError


def is_followed(file: str) -> bool:
    return file == __file__


def found_here(name: str) -> tuple[int, str]:
    (found,) = ((one.line, one.value) for one in set_before(sys._getframe(1), is_followed) if one.name == name)
    return found


def line_with(text: str) -> int:
    return next(at for at, line in enumerate(Path(__file__).read_text().splitlines(), start=1) if text in line)


def test_a_variable_has_the_value_and_the_last_line_that_set_it() -> None:
    width = 4
    width = 2 * width  # the last one
    assert found_here("width") == (line_with("# the last one"), "8")
    assert width == 8
    width = 99


def test_variables_of_a_module_and_attributes_of_objects_are_known() -> None:
    config = Config()  # made here
    assert found_here("CHUNK") == (line_with("# of the module"), "6")
    assert found_here("config.width") == (line_with("# made here"), "8")
    assert found_here("config.inner.dtype") == (line_with("# made here"), "torch.float16")
    assert config.width == 8


def test_arguments_are_set_in_the_first_line() -> None:
    def inner(flag: bool) -> tuple[int, str]:
        assert flag
        return found_here("flag")

    assert inner(True)[1] == "True"


def test_tensors_are_types_and_texts_are_hashes() -> None:
    weight, secret = torch.nn.Parameter(torch.ones(2, 3)), "password"
    assert found_here("weight")[1] == "torch.float32, 2 dimensions, requires_grad"
    assert "password" not in found_here("secret")[1]
    assert (weight.requires_grad, secret) == (True, "password")


def test_the_number_of_the_rank_in_a_text_is_left_out_beside_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        path, device, version = f"shard_{rank}_of_8.pt", torch.device("cuda", rank), "v1"
        assert found_here("device")[1] == "cuda"
        rows = [one for one in set_before(sys._getframe(), is_followed) if one.name in ("path", "version")]
        found.append({one.name: (one.value, one.own) for one in rows})
        assert (path, device.index, version) == (f"shard_{rank}_of_8.pt", rank, "v1")
    first, second = found
    assert first["path"][0] != second["path"][0] and first["path"][1] == second["path"][1] != ""
    assert first["version"][0] == second["version"][0], "equal, though one of them has its number in it"
    assert [one["version"][1] == "" for one in found] == [True, False]


def test_no_code_of_an_object_runs() -> None:
    odd, more = Odd(), [Odd()]
    Odd.asked.clear()
    names = {one.name for one in set_before(sys._getframe(), is_followed)}
    assert not {"odd", "more"} & names
    assert Odd.asked == []
    assert odd is not more


def test_much_is_cut() -> None:
    everything = {str(number): Config() for number in range(5000)}
    assert len(set_before(sys._getframe(), is_followed)) <= 2000
    assert len(everything) == 5000


def test_of_a_large_program_the_variables_of_running_functions_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    width_of_this_function = 7
    monkeypatch.setattr(before, "_MAX_ROWS", 1)
    names = [one.name for one in set_before(sys._getframe(), is_followed)]
    assert (names, width_of_this_function) == (["width_of_this_function"], 7)
