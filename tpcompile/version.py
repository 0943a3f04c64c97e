"""The version of the package; both distributions, tpcompile and tpcompile-reader, are built with it."""

__version__ = "0.1.0"
