"""What each rank brings -> what one of them has settled, the same on all: the first settled value wins.

Through the store, never by a collective: ranks that are about to run something different would wait for each other in
the collectives of what they run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from pydantic_core import to_jsonable_python

from tpcompile.ranks.store import RankStore


def bring(store: RankStore, mine: Any) -> None:
    """Bring `mine` to an agreement that this rank does not wait for: the others need not wait for it."""
    store.put(_key(store.rank), to_jsonable_python(mine))


def agree(
    store: RankStore,
    ranks: Iterable[int],
    mine: Any,
    *,
    kind: Any,
    decide: Callable[[dict[int, Any], dict[int, str]], Any],
    result: Any,
    timeout_s: float,
    gone: Callable[[int], bool] = lambda rank: False,
) -> Any:
    """Bring `mine`, of type `kind`; return what one of `ranks` has decided, of type `result`, from what all brought.

    `store` has a prefix for this agreement alone. `decide` gets what each rank brought, and the ranks that did not
    within `timeout_s` or are `gone`, with what was wrong where one sent something that is no `kind`. A rank that comes
    when it is settled takes that: it must not go on alone. RuntimeError when the store cannot be reached.
    """
    keys = {rank: _key(rank) for rank in sorted(ranks)}
    first = min(keys)
    deadline_s = time.monotonic() + timeout_s
    bring(store, mine)
    if store.rank != first:
        # The lowest rank decides, so that the cost grows with the ranks, not with their square; any other one decides
        # where it does not.
        settled, _ = store.gather({first: "settled"}, result, timeout_s=timeout_s, gone=gone)
        if settled:
            return settled[first]
    theirs = {rank: key for rank, key in keys.items() if rank != store.rank}
    left_s = max(0.0, deadline_s - time.monotonic())
    brought, missing = store.gather(theirs, kind, timeout_s=left_s, stop_at="settled", gone=gone)
    brought[store.rank] = mine
    absent = {rank: store.why_refused(keys[rank]) for rank in missing}
    own = decide(dict(sorted(brought.items())), absent)
    settled_first = store.put_first("settled", to_jsonable_python(own), result)
    return own if settled_first is None else settled_first


def _key(rank: int) -> str:
    return f"brought/{rank}"
