"""Programs for the benchmark that are wrong, raise, die or hang."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection

from torch import Tensor

from tpcompile.bench.ours import stack_of
from tpcompile.bench.programs import Built, Setup
from tpcompile.bench.worker import Task
from tpcompile.collectives.api import Dst
from tpcompile.collectives.strategies import Collectives


class Unsummed(Collectives):
    """The wrong reduction: what the ranks have is not summed."""

    def all_reduce(self, x: Tensor, dst: Dst = "I") -> Tensor:
        """This rank's part, as large as the sum."""
        return x * self.size


def unsummed(setup: Setup) -> Built:
    return stack_of(setup, Unsummed(setup.group))


def raises(setup: Setup) -> Built:
    """On one rank; the other waits for it."""
    if setup.group.rank() == 1:
        raise ValueError("the weights of rank 1 are gone")
    return stack_of(setup, Collectives(setup.group))


def dies(setup: Setup) -> Built:
    if setup.group.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return stack_of(setup, Collectives(setup.group))


def hangs(connection: Connection, task: Task) -> None:
    """Serves nothing."""
    connection.send({"at": "its nap"})
    time.sleep(600)
