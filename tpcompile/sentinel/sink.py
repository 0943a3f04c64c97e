"""Where the messages of the sentinel go."""

from __future__ import annotations

from tpcompile.sink import Sink

logger = Sink("sentinel")
