"""One hash for all that a launcher runs: an edit anywhere in it changes the hash, a comment does not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fastpath import kernels
from tpcompile.errors import ConfigError
from tpcompile.fastpath.source import Source, source_of

pytest.importorskip("triton")
KERNELS = Path(__file__).with_name("kernels.py")


def read(folder: Path, monkeypatch: pytest.MonkeyPatch, *edit: str) -> Source:
    """Source of the launcher in a copy of the kernels, with one text replaced by another."""
    text = KERNELS.read_text()
    if edit:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    (folder / "copied_kernels.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "copied_kernels", raising=False)
    importlib.invalidate_caches()
    return source_of(importlib.import_module("copied_kernels").launch)


def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *edit: str) -> Source:
    folder = tmp_path / name  # apart, or Python would take a module of the same second from its cache
    folder.mkdir()
    return read(folder, monkeypatch, *edit)


def test_the_kernels_of_a_launcher_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(tmp_path, monkeypatch, "plain").kernels
    assert found == {"copied_kernels.norm_kernel", "copied_kernels.scale"}


@pytest.mark.parametrize(
    "edit",
    [
        ("tl.load(x_ptr + offsets,", "tl.load(x_ptr + offsets + 1,"),
        ("return x * eps", "return x + eps"),
        ("tl.constexpr(128)", "tl.constexpr(256)"),
        ("triton.cdiv(size, 4)", "triton.cdiv(size, 8)"),
        ("EPS = 1e-6", "EPS = 1e-5"),
        ("y = torch.empty_like(x)\n    norm_kernel[(b", "y = torch.zeros_like(x)\n    norm_kernel[(b"),
    ],
    ids=["kernel", "helper kernel", "constexpr", "grid", "constant", "launcher"],
)
def test_an_edit_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]) -> None:
    before, after = source(tmp_path, monkeypatch, "before"), source(tmp_path, monkeypatch, "after", *edit)
    assert before.sha256 != after.sha256


@pytest.mark.parametrize(
    "edit",
    [("    offsets = tl.arange(0, SIZE)\n", "    # all of them\n    offsets = tl.arange(0,  SIZE)\n"),
     ("return x * 128", "return x * 129")],
    ids=["comment and layout", "what it does not run"],
)  # fmt: skip
def test_what_changes_nothing_leaves_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str]
) -> None:
    assert source(tmp_path, monkeypatch, "before") == source(tmp_path, monkeypatch, "after", *edit)


def test_a_launcher_without_source_is_refused() -> None:
    scope: dict[str, object] = {"__name__": "typed"}
    exec("def typed(x): return x", scope)
    with pytest.raises(ConfigError, match=r"typed\.typed"):
        source_of(scope["typed"])  # type: ignore[arg-type]  # a function, by exec
    with pytest.raises(ConfigError, match="Python function"):
        source_of(len)


@pytest.mark.parametrize("make", [torch.library.custom_op, torch.library.triton_op])
def test_an_op_made_from_a_launcher_runs_what_the_launcher_runs(make: Callable[..., Any]) -> None:
    name = f"tpcompile_tests::{make.__name__}_of_launch"
    op = source_of(make(name, mutates_args=())(kernels.launch))
    launcher = source_of(kernels.launch)
    assert (op.kernels, op.functions) == (launcher.kernels, launcher.functions)
    assert (op.ops, launcher.ops) == ({name}, frozenset())


def test_a_backward_that_is_registered_belongs_to_the_source() -> None:
    op = torch.library.custom_op("tpcompile_tests::trained", mutates_args=())(kernels.launch)
    before = source_of(op)
    op.register_autograd(lambda ctx, grad: kernels.plain(grad))
    trained = source_of(op)
    assert trained.sha256 != before.sha256 and kernels.plain in trained.functions


def test_so_does_what_is_registered_for_fake_tensors_and_devices_and_the_plain_code() -> None:
    op = torch.library.custom_op("tpcompile_tests::faked", mutates_args=())(kernels.launch)
    op.register_fake(lambda x: torch.empty_like(x))
    found = [source_of(op).sha256]
    op.register_fake(lambda x: kernels.plain(x))
    found.append(source_of(op).sha256)
    op.register_kernel("cpu")(lambda x: kernels.plain(x))
    found.append(source_of(op).sha256)
    with_reference = source_of(op, reference=kernels.plain)
    found.append(with_reference.sha256)
    assert len(set(found)) == 4
    assert kernels.plain not in with_reference.functions  # what a launcher does not run is not mutated


class Pair:
    """An object that refers to others, as configurations and models do."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def _helper() -> int:
    return 1


def _keeps(value: Any) -> Callable[..., Any]:
    def backend(module: Any, inputs: Any) -> Any:
        return value

    return backend


def _reached_in_many_ways(depth: int) -> Any:
    value = Pair(_helper, 1)
    for _ in range(depth):
        value = Pair(value, value)
    return value


def _far_down(depth: int) -> Any:
    value = Pair(_helper, 1)
    for _ in range(depth):
        value = Pair(value, 1)
    return value


@pytest.mark.parametrize("value", [_reached_in_many_ways(60), _far_down(3000)], ids=["in many ways", "far down"])
def test_all_that_a_closure_reaches_is_followed_once(value: Any) -> None:
    """Read anew for each way to it, 60 objects have no end."""
    found = source_of(_keeps(value))
    assert _helper in found.functions
    assert found.refused
