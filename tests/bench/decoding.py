"""`python -m tests.bench.decoding ARGUMENTS`: scripts/bench_decoding.py with a wrong model of ours, and a death."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Connection

from torch import Tensor

from scripts import bench_decoding, decoding_ranks
from tpcompile.bench.worker import Task


class Flipped(decoding_ranks.Drawn):
    """Tokens in the opposite order in the projection to the vocabulary."""

    def __getitem__(self, name: str) -> Tensor:
        full = super().__getitem__(name)
        return full.flip(0) if name == "lm_head.weight" else full


class Dies(decoding_ranks.Decoder):
    """In its first round."""

    def round(self) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")


def serve(connection: Connection, task: Task) -> None:
    """Instead of `decoding_ranks.serve`."""
    if task.program == "ours":
        decoding_ranks.Drawn = Flipped
    if task.program == "transformers" and os.environ["RANK"] == "1":
        decoding_ranks.Decoder = Dies
    decoding_ranks.serve(connection, task)


if __name__ == "__main__":
    bench_decoding.SERVER = "tests.bench.decoding:serve"
    sys.exit(bench_decoding.main(bench_decoding.parsed()))
