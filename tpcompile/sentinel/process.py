"""The process that a rank registers at the start -> whether it is alive, for ranks that get no answer from it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from tpcompile.evidence.records import Frozen
from tpcompile.ranks.liveness import Liveness, process_state


class Process(Frozen):
    """One rank's process; all fields are empty before it registers."""

    pid: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    host: str = ""
    black_box: Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")] = ""
    """Name of the file that faulthandler writes if the process aborts, never its path; empty for none."""
    main_thread: Annotated[int, Field(ge=0, lt=1 << 64)] = 0

    def state(self) -> Liveness:
        """Whether it is alive, as far as this host can observe."""
        return process_state(self.pid, self.host)
