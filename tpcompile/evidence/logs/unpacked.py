"""Logs, some of them packed with gzip -> plain files with the same records, for as long as they are read."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tpcompile.errors import ConfigError
from tpcompile.evidence.groups.by_rank import ByRank

PACKED = ".gz"
MAX_BYTES = 1 << 32
"""Most bytes that one packed log may unpack to: no log has as many, but a few bytes can claim any number."""
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class PlainLogs:
    """The logs of a job as plain files."""

    paths: ByRank[Path]
    cut: frozenset[int] = frozenset()
    """Ranks whose packed log ends early or is damaged: what could be unpacked is there."""


@contextmanager
def unpacked(paths: ByRank[Path]) -> Iterator[PlainLogs]:
    """Plain logs; those that were packed are in a folder that is removed at the end. Raises ConfigError, OSError.

    A record is read again where a compile is parsed in full, so a packed log is unpacked once, to disk.
    """
    packed = paths.where(lambda path: path.suffix == PACKED)
    if not packed:
        yield PlainLogs(paths)
        return
    with tempfile.TemporaryDirectory(prefix="tpcompile-logs-") as folder:
        plain = {rank: Path(folder, f"{rank}.log") for rank in packed}
        cut = frozenset(rank for rank, path in packed.items() if not _unpack(path, plain[rank]))
        yield PlainLogs(ByRank({**paths, **plain}), cut)


def _unpack(packed: Path, plain: Path) -> bool:
    """False where the packed file ends early or is damaged."""
    num_bytes = 0
    with packed.open("rb") as source, gzip.GzipFile(fileobj=source) as file, plain.open("wb") as out:
        try:
            while block := file.read1(_BLOCK_BYTES):
                num_bytes += len(block)
                if num_bytes > MAX_BYTES:
                    raise ConfigError(f"{packed} unpacks to more than {MAX_BYTES:,} bytes; a log has fewer")
                out.write(block)
        except (EOFError, gzip.BadGzipFile, zlib.error):
            return False
    return True
