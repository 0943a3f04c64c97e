"""The sentinel looks at the exchanges of this process when its block ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sentinel.ranks import Ranks
from tpcompile.errors import FastPathError
from tpcompile.fastpath import peers
from tpcompile.testing import run_on_ranks

LATE = "rank 1 of the group did not arrive"


class Followed:
    """An exchange whose wait has run out, or not."""

    group = None

    def __init__(self, text: str) -> None:
        self.text = text

    def check(self) -> None:
        if self.text:
            raise FastPathError(self.text)


def ended(text: str, other: BaseException | None = None) -> tuple[str, list[str]]:
    """What leaves a block of the sentinel, and its findings."""
    exchange = Followed(text)
    peers.follow(exchange)
    sentinel = Ranks().sentinel(policy="warn")
    try:
        with sentinel:
            if other is not None:
                raise other
    except Exception as error:
        return repr(error), [found.checks[0].observed for found in sentinel.findings]
    finally:
        exchange.text = ""  # a traceback may keep it
    return "", []


def blocks() -> dict[str, Any]:
    return {
        "in vain": ended(LATE),
        "arrived": ended(""),
        "raised": ended(LATE, ValueError("of the program")),
    }


def test_a_kernel_that_waited_in_vain_is_an_error_of_the_block() -> None:
    """And its finding; where the block raises, that is the error."""
    (found,) = run_on_ranks(blocks, world_size=1, timeout_s=120)
    assert found["in vain"] == (f"FastPathError({LATE!r})", [f"FastPathError: {LATE}"])
    assert found["arrived"] == ("", [])
    assert found["raised"][0] == "ValueError('of the program')"


def test_what_is_no_longer_in_use_is_not_looked_at() -> None:
    exchange = Followed(LATE)
    peers.follow(exchange)
    assert str(peers.failure()) == LATE
    del exchange
    assert peers.failure() is None


def test_without_a_process_group_an_error_is_not_published() -> None:
    with pytest.raises(FastPathError, match="of this rank"), peers.telling():
        raise FastPathError("of this rank")
