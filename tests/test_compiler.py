"""The compiler of the tests: each source is compiled once, and what fails or differs is compiled again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compiler import compile_once

FAKE = """#!/bin/sh
echo run >> "{log}"
grep -q wrong "$1" && exit 1
cat "$1" > "$3"
"""


class Compiler:
    """A compiler that copies, and counts its starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.script = folder / "cc"
        self.script.write_text(FAKE.format(log=self.log))
        self.script.chmod(0o755)
        (folder / "kept").mkdir()

    def __call__(self, output: Path, text: str, *flags: str) -> int:
        source = output.with_suffix(".cpp")
        source.write_text(text)
        arguments = [str(source), "-o", str(output), *flags]
        return compile_once(self.folder / "kept", str(self.script), arguments)

    @property
    def starts(self) -> int:
        return len(self.log.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    return Compiler(tmp_path)


def test_the_same_source_in_a_different_place_is_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    assert compiler(tmp_path / "one.so", "int x;") == compiler(tmp_path / "two.so", "int x;") == 0
    assert (tmp_path / "one.so").read_text() == (tmp_path / "two.so").read_text() == "int x;"
    assert compiler.starts == 1


def test_a_different_source_or_flag_is_compiled_again(compiler: Compiler, tmp_path: Path) -> None:
    for text, flags in (("int x;", ()), ("int y;", ()), ("int x;", ("-O0",))):
        compiler(tmp_path / "out.so", text, *flags)
        assert (tmp_path / "out.so").read_text() == text
    assert compiler.starts == 3


def test_what_cannot_be_compiled_fails_each_time(compiler: Compiler, tmp_path: Path) -> None:
    assert [compiler(tmp_path / "out.so", "wrong") for _ in range(2)] == [1, 1]
    assert compiler.starts == 2


def test_where_the_copy_cannot_be_written_the_compiler_writes_or_says_why_not(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path / "one.so", "int x;")

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tests.compiler.shutil.copy", full)
    assert compiler(tmp_path / "two.so", "int x;") == 0
    assert (compiler.starts, (tmp_path / "two.so").read_text()) == (2, "int x;")
