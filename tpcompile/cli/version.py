"""`tpcompile version`: versions to put into a bug report."""

from __future__ import annotations


def version() -> None:
    """Print the versions of tpcompile, Python, torch and triton (read from metadata, torch is not imported)."""
    import platform
    from importlib import metadata

    for name in ("tpcompile", "torch", "triton"):
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        print(f"{name} {found}")
    print(f"python {platform.python_version()}")
