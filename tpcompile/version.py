"""The version of both distributions, tpcompile and tpcompile-reader; and those of others."""

__version__ = "0.1.0"


def installed(name: str) -> str:
    """Version of a distribution; empty where it is not installed."""
    from importlib import metadata  # not for `--help`

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
