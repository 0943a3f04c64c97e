"""`tpcompile bench` with the peers of docs/bench.md beside the block that ships, by the short names of results/.

    python scripts/bench_peers/run.py --nproc 2 --preset wan14b_8 --layers 4 --program C --program dtensor:graphed

`--program dtensor:graphed` becomes `--program FILE:dtensor:graphed`, with the file of this folder that has it; the same
for `--without`. Every other option is passed on. Without `--program`: all programs of `tpcompile bench`, and all peers
as they are and as CUDA graphs. With `--baseline` its programs are the default, as they are of `tpcompile bench`.

A command in results/ that begins with `tpcompile bench` and names a peer is one of this script today.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpcompile.bench.names import DEFAULT

FOLDER = Path(__file__).resolve().parent
PEERS = {
    "dtensor": "peers.py:dtensor", "dtensor_sp": "peers.py:dtensor_sp", "async_tp": "peers.py:async_tp",
    "hooks": "peers.py:hooks", "transformers": "hf.py:transformers_tp",
}  # fmt: skip
NAMES = ("--program", "--without")


def arguments_of(given: Sequence[str]) -> Iterator[str]:
    """The arguments of `tpcompile bench`."""
    words = [word for one in given for word in (one.split("=", 1) if one.startswith(tuple(NAMES)) else [one])]
    for option, word in zip(["", *words], words, strict=False):
        yield program(word) if option in NAMES else word
    if not {"--program", "--baseline", "--help", "-h"} & set(words):
        peers = [f"{peer}{variant}" for peer in PEERS for variant in ("", ":graphed")]
        for name in (*DEFAULT, *peers):
            yield from ("--program", program(name))


def program(name: str) -> str:
    """A name of `tpcompile bench` as it is; that of a peer with its file."""
    base, *variants = name.split(":")
    if base not in PEERS:
        return name
    return ":".join([os.path.relpath(FOLDER / PEERS[base]), *variants])


if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "tpcompile", "bench", *arguments_of(sys.argv[1:])])
