"""Lines of source -> whose they are."""

from __future__ import annotations

import functools
import linecache
import logging
import os
import sys
import traceback
from pathlib import Path

import pytest

import tpcompile
from tests.evidence.samples import compiled, line
from tpcompile import target
from tpcompile.evidence.digests.digest import digest_compile
from tpcompile.evidence.records import UserLine
from tpcompile.evidence.text import lines
from tpcompile.evidence.text.lines import (
    BETWEEN,
    called_at,
    innermost,
    innermost_own,
    is_library,
    line_of_frame,
    lines_of,
    with_whole_path,
)

OF_PROGRAMS = {"bench", "doctor", "explain", "nn", "numerics", "typecheck"}
"""Our packages whose lines are programs, or call them."""


def test_every_package_of_ours_is_between_a_program_and_torch_or_part_of_programs() -> None:
    folder = Path(tpcompile.__path__[0])
    packages = {file.parent.name for file in folder.glob("*/__init__.py")}
    assert packages == OF_PROGRAMS | set(BETWEEN), "tpcompile/evidence/text/lines.py lists them"
    assert OF_PROGRAMS.isdisjoint(BETWEEN)
    for name in packages:
        file = f"/opt/lib/python3.11/site-packages/tpcompile/{name}/some.py"
        assert is_library(UserLine(file=file, line=1)) == (name in BETWEEN)


def test_lines_of_the_faults_of_the_gate_count_as_the_users() -> None:
    assert not is_library(UserLine(file="/opt/python3.11/site-packages/tpcompile/gate/faults/program.py", line=1))


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3.12/logging/__init__.py",
        "/root/.pyenv/versions/3.11.7/lib/python3.11/contextlib.py",
        "/opt/conda/lib/python3.11/site-packages/torch/nn/modules/module.py",
        "<frozen importlib._bootstrap>",
        logging.__file__,
        "/opt/conda/lib/python3.11/site-packages/tpcompile/target.py",
        target.__file__,
        "/tmp/torchinductor_me/jl/cjl6q3pjxpblcymt4ka4yxw7kz3xxgq2cvu6xjyuvilwp536gkc6.py",
        "/scratch/cache/jl/cjl6q3pjxpblcymt4ka4yxw7kz3xxgq2cvu6xjyuvilwp536gkc6.py",
    ],
)
def test_torch_and_the_standard_library_are_no_lines_of_the_user(file: str) -> None:
    assert is_library(UserLine(file=file, line=1))


@pytest.mark.parametrize(
    "file",
    [
        "/home/me/lib/model.py",
        "/opt/conda/lib/python3.11/site-packages/transformers/models/llama.py",
        "/home/me/mo/cmodel.py",
        "/home/me/tpcompile/target.py",
        "/home/me/on/continuous_batching_scheduler.py",
    ],
)
def test_other_packages_are_lines_of_the_user(file: str) -> None:
    assert not is_library(UserLine(file=file, line=1))


def test_a_path_that_torch_cut_is_completed_from_its_code() -> None:
    cut = UserLine(file="logging/__init__.py", line=1, code="# Copyright 2001-")
    assert is_library(cut)
    assert not is_library(cut.model_copy(update={"code": "y = self.head(x)"}))


def test_a_folder_that_an_installer_filled_holds_packages_and_may_hold_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install --target`: its records list what is a package."""
    record = tmp_path / "fused-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("fused/__init__.py,sha256=x,1\nfused/ops/norm.py,,\nsingle.py,,\n../../bin/fused,,\n")
    package, module, program = (str(tmp_path / name) for name in ("fused/ops/norm.py", "single.py", "train.py"))
    assert not lines.is_packaged(package)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert lines.is_packaged(package) and lines.is_packaged(module) and not lines.is_packaged(program)
    assert lines.in_package(package) == "fused/ops/norm.py"
    assert lines.is_installed(UserLine(file=package, line=1))


def test_a_folder_that_cannot_be_read_has_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is asked while the user's function starts."""

    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(sys, "path", [*sys.path, "/not/for/us", b"/of/bytes"])
    monkeypatch.setattr(lines.Path, "glob", denied)
    assert lines.installed_in("/not/for/us/model.py") == ""


WRAPPER = UserLine(file="/v/lib/python3.11/site-packages/torch/_dynamo/external_utils.py", line=67, function="inner")


def test_what_is_installed_with_torch_is_torchs() -> None:
    installed = "/v/lib/python3.12/site-packages"
    assert lines.is_library_file(f"{installed}/torchgen/utils.py")
    assert not lines.is_library_file(f"{installed}/torchvision/utils.py")


def test_a_path_that_leads_out_of_the_library_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths come from peers and logs: one to a device or a pipe would be read for ever."""
    read: list[str] = []
    monkeypatch.setattr(linecache, "getline", lambda path, number: read.append(path) or "")
    (torch_folder, *_) = lines._library_folders()
    secret = tmp_path / "secret"
    secret.write_text("code")
    for file in (os.path.relpath(secret, torch_folder), "a/../../../dev/zero", "a/" * 100_000 + "b.py"):
        assert lines.own_lines([UserLine(file=file, line=1, code="code")])
        assert read == []
    assert lines.own_lines([UserLine(file="nn/modules/module.py", line=1, code="code")])
    assert read  # the control: a path that torch cut is looked for


def test_a_region_in_torch_is_placed_at_the_line_that_calls_it() -> None:
    caller = line(50, "/app/train.py")
    assert innermost_own([caller, WRAPPER]) == caller
    found = digest_compile(compiled(function="inner", line=WRAPPER, stack=(caller, WRAPPER)), 0)
    assert (found.line, found.frame) == (caller, "inner _dynamo/external_utils.py:67")


def test_a_region_of_the_user_is_placed_at_its_own_line() -> None:
    own = line(3)
    assert digest_compile(compiled(line=own, stack=(line(50, "/app/train.py"), own)), 0).line == own


TORCH = "/v/lib/python3.11/site-packages/torch"
CALL = UserLine(file=f"{TORCH}/nn/modules/module.py", line=1789, function="_call_impl")


def test_the_caller_of_a_compiled_module_is_the_nearest_line_of_the_program() -> None:
    main, installed = line(50, "/app/train.py"), line(7, "/v/lib/python3.11/site-packages/trainer/loop.py")
    assert called_at([main, installed, CALL, line(3)]) == main


def test_of_a_compiled_function_torch_leaves_the_caller_out_so_that_none_is_named() -> None:
    decorated = UserLine(file=f"{TORCH}/utils/_contextlib.py", line=124, function="decorate_context")
    assert called_at([line(50, "/app/train.py"), line(3)]) is None
    assert called_at([line(50, "/app/train.py"), decorated, line(3)]) is None
    assert called_at([line(3)]) is None


def test_a_cut_path_is_made_whole_where_one_file_fits() -> None:
    cut = UserLine(file="app/model.py", line=3)
    assert with_whole_path(cut, ["/home/me/app/model.py", "/home/me/other.py"]).file == "/home/me/app/model.py"
    assert with_whole_path(cut, ["/a/app/model.py", "/b/app/model.py"]) == cut
    assert with_whole_path(cut, ["/a/myapp/model.py", "/b/app/model.py"]).file == "/b/app/model.py"


def test_the_line_of_a_frame_is_the_innermost_of_its_stack() -> None:
    found: list[UserLine | None] = []

    class Lazy:
        @functools.cached_property
        def value(self) -> None:
            frame = sys._getframe(1)  # of functools, which the user's line below has called
            found.extend((line_of_frame(frame), innermost(lines_of(traceback.extract_stack(frame)))))

    Lazy().value  # noqa: B018
    assert found[0] == found[1] and found[0] is not None
    assert found[0].code == "Lazy().value  # noqa: B018"


def test_where_no_line_is_the_users_the_frame_has_its_own() -> None:
    outermost = sys._getframe()
    while outermost.f_back is not None:
        outermost = outermost.f_back
    found = line_of_frame(outermost)
    assert (found.file, found.line) == (outermost.f_code.co_filename, outermost.f_lineno)
