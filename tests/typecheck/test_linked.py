"""Torch in an environment that is linked: its frames are never the user's."""

from __future__ import annotations

from pathlib import Path

from tpcompile.typecheck import site


def test_a_package_is_known_by_its_path_with_and_without_links(tmp_path: Path) -> None:
    (tmp_path / "real" / "torch").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    known = site._folders(str(tmp_path / "linked" / "torch" / "__init__.py"))
    for folder in ("linked", "real"):
        assert str(tmp_path / folder / "torch" / "nn" / "functional.py").startswith(known)
    assert not str(tmp_path / "model.py").startswith(known)
