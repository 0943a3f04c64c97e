"""Where the compilers write: can it be written, is there room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.doctor import caches
from tpcompile.doctor.finding import Level


def environ(folder: Path, **more: str) -> dict[str, str]:
    places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TMPDIR": "."}
    return {name: str(folder / place) for name, place in places.items()} | more


def test_folders_that_can_be_made_are_fine_and_are_not_made(tmp_path: Path) -> None:
    assert {found.level for found in caches.caches(environ(tmp_path))} == {Level.OK}
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_fails_with_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "inductor").touch()
    found = {one.name: one for one in caches.caches(environ(tmp_path))}
    broken = found.pop("cache TORCHINDUCTOR_CACHE_DIR")
    assert (broken.level, "TORCHINDUCTOR_CACHE_DIR" in broken.todo) == (Level.FAIL, True)
    assert {one.level for one in found.values()} == {Level.OK}


def test_a_folder_that_the_system_refuses_fails(tmp_path: Path) -> None:
    found = caches.caches(environ(tmp_path, TRITON_CACHE_DIR="/proc/none"))
    assert [one.name for one in found if one.level == Level.FAIL] == ["cache TRITON_CACHE_DIR"]


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 1 << 20

    monkeypatch.setattr(caches.shutil, "disk_usage", lambda _: Full)
    assert {found.level for found in caches.caches(environ(tmp_path))} == {Level.WARN}


def test_the_size_of_a_cache_is_counted(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "kernel").write_bytes(b"0" * (3 << 20))
    (triton,) = [one for one in caches.caches(environ(tmp_path)) if "TRITON" in one.name]
    assert "3 MiB used" in triton.says


@pytest.mark.slow
def test_the_default_folders_are_those_of_torch_and_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir
    from triton import knobs

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    found = caches.folders({})
    assert str(found["TORCHINDUCTOR_CACHE_DIR"]) == default_cache_dir()
    assert str(found["TRITON_CACHE_DIR"]) == knobs.cache.dir
