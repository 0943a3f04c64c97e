"""The names of torch that graph passes need are there, and mean what the passes take them for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor import config

from tpcompile.torch_api.passes import AFTER_AUTOGRAD, CustomGraphPass, OpOverload, get_hash_for_files, tree_leaves


def test_torch_still_has_the_option() -> None:
    assert hasattr(config, AFTER_AUTOGRAD)


def test_a_pass_must_have_an_identity() -> None:
    assert {"__call__", "uuid"} <= CustomGraphPass.__abstractmethods__


def test_the_hash_is_that_of_the_contents(tmp_path: Path) -> None:
    file = tmp_path / "a_pass.py"
    file.write_text("1")
    first = get_hash_for_files((str(file),))
    get_hash_for_files.cache_clear()  # torch reads a file once in a process
    assert get_hash_for_files((str(file),)) == first
    file.write_text("2")
    get_hash_for_files.cache_clear()
    assert get_hash_for_files((str(file),)) != first


def test_an_op_in_a_graph_is_an_overload() -> None:
    assert isinstance(torch.ops.aten.mm.default, OpOverload)
    assert not isinstance(torch.ops.aten.mm, OpOverload)


def test_leaves_are_the_values_of_nested_arguments() -> None:
    assert tree_leaves(((1, [2]), {"three": 3})) == [1, 2, 3]
