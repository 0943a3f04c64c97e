"""torch's module of process groups, newly imported -> a job that is watched from its first group to its last.

Without imports of torch: it is in the middle of its own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any


def watch(groups: Any) -> None:
    """Have `init_process_group` start the sentinel, and `destroy_process_group` end it."""
    init, destroy = groups.init_process_group, groups.destroy_process_group

    @functools.wraps(init)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        made = init(*args, **kwargs)
        from tpcompile.autostart.in_rank import start

        start()
        return made

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> Any:
        from tpcompile.autostart.in_rank import end

        if group is None or group is groups.GroupMember.WORLD:
            end(sys.exc_info()[1])  # in a `finally`, that of the program
        return destroy(group)

    groups.init_process_group, groups.destroy_process_group = init_process_group, destroy_process_group
