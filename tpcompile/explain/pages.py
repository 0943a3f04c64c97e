"""Cause -> the markdown of its page."""

from __future__ import annotations

from importlib import resources

from tpcompile.evidence.records.causes import Cause


def page(cause: Cause) -> str:
    """The page, as it is installed with the package."""
    file = resources.files("tpcompile.explain") / "causes" / f"{cause.slug}.md"
    return file.read_text(encoding="utf-8")
