"""What the operating system knows: each part as it should be, and broken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tpcompile.doctor import host
from tpcompile.doctor.finding import Level


def program(folder: Path, name: str, code: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{code}\n")
    file.chmod(0o755)
    return file


def test_without_a_compiler_on_the_path_it_fails_with_what_to_do(tmp_path: Path) -> None:
    found = host.compiler({"PATH": str(tmp_path)})
    assert (found.level, "g++" in found.says, "CXX" in found.todo) == (Level.FAIL, True, True)


def test_a_compiler_that_does_not_run_fails(tmp_path: Path) -> None:
    broken = program(tmp_path, "g++", "exit 1")
    assert host.compiler({"CXX": str(broken)}).level == Level.FAIL
    assert host.compiler({"CXX": str(program(tmp_path, "c++", "echo c++ 12.2.0"))}).says == "c++ 12.2.0"


def test_a_small_or_missing_shared_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.shared_memory(tmp_path / "none").level == Level.WARN
    for free, level in ((64 << 20, Level.WARN), (8 << 30, Level.OK)):
        monkeypatch.setattr(host.shutil, "disk_usage", lambda _, free=free: _Usage(free))
        assert host.shared_memory(tmp_path).level == level


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = self.total = free


def test_a_port_that_is_taken_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        assert host.port(number).level == Level.WARN
    assert host.port(number).level == Level.OK


def test_a_host_without_an_address_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> str:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(socket, "gethostbyname", refuse)
    found = host.addresses()
    assert (found.level, "node-17" in found.todo) == (Level.WARN, True)


def test_a_localhost_that_cannot_be_bound_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def bind(self, _: object) -> None:
            raise OSError("no such device")

    monkeypatch.setattr(socket, "socket", Refusing)
    assert host.addresses().level == Level.FAIL
