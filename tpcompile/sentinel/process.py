"""The process that a rank registers at the start -> whether it is alive, for ranks that get no answer from it."""

from __future__ import annotations

from tpcompile.evidence.records import Frozen
from tpcompile.ranks.liveness import Liveness, process_state


class Process(Frozen):
    """One rank's process; all fields are empty before it registers."""

    pid: int = 0
    host: str = ""
    black_box: str = ""
    """The file that faulthandler writes if the process aborts; empty for none."""
    main_thread: int = 0

    def state(self) -> Liveness:
        """Whether it is alive, as far as this host can observe."""
        return process_state(self.pid, self.host)
