"""What a rank says of its process when it comes -> whether that process lives, for ranks that hear nothing of it."""

from __future__ import annotations

from tpcompile.evidence.records import Frozen
from tpcompile.ranks.liveness import Liveness, process_state


class Process(Frozen):
    """One rank's process; of one that has not come nothing is known."""

    pid: int = 0
    host: str = ""
    black_box: str = ""
    """The file in which it would leave its last stack, empty for none."""
    main_thread: int = 0

    def state(self) -> Liveness:
        """Whether it lives, as far as this host can tell."""
        return process_state(self.pid, self.host)
