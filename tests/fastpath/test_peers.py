"""The sentinel looks at the exchanges of this process when its block ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.sentinel.ranks import Ranks
from tpcompile.errors import FastPathError
from tpcompile.fastpath import peers
from tpcompile.fastpath.in_turn import Turns
from tpcompile.fastpath.kernels.exchange_memory import Exchange
from tpcompile.fastpath.measured import Decision, ShapeClass
from tpcompile.nn import fast_paths
from tpcompile.testing import run_on_ranks

LATE = "rank 1 of the group did not arrive"


class Followed:
    """An exchange whose wait has run out, or not."""

    name = ""

    def __init__(self, text: str, group: Any = None) -> None:
        self.text, self.group, self.is_closed = text, group, False
        self.state, self.turns = torch.zeros(1), Turns()

    def check(self) -> None:
        if self.text:
            raise FastPathError(self.text)

    def close(self) -> None:
        self.is_closed = True


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
    with pytest.raises(FastPathError, match="of this rank"), peers.calling(None):
        raise FastPathError("of this rank")


def test_a_call_is_counted_once_whether_it_is_refused_before_its_launch_or_in_it() -> None:
    exchange = Followed("")
    peers.follow(exchange)
    with peers.calling(exchange), peers.launching(exchange.state):
        pass
    with pytest.raises(FastPathError), peers.calling(exchange):
        raise FastPathError("before")
    with pytest.raises(FastPathError), peers.calling(exchange), peers.launching(exchange.state):
        raise FastPathError("in it")
    assert (exchange.turns.count, exchange.turns.refused) == (3, {2, 3})


@pytest.mark.parametrize("is_known", [True, False])
def test_a_refusal_closes_the_exchanges_of_its_group(is_known: bool) -> None:
    """Of every group where the exchange is not known: a copy of its state was passed."""
    refused, same, other = (Followed("", group) for group in ("tp", "tp", "dp"))
    for exchange in (refused, same, other):
        peers.follow(exchange)
    state = refused.state if is_known else refused.state.clone()
    with pytest.raises(FastPathError), peers.launching(state):
        raise FastPathError("wrong")
    assert [refused.is_closed, same.is_closed, other.is_closed] == [True, True, not is_known]


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_two_threads_in_one_exchange_are_refused_and_one_after_the_other_is_not() -> None:
    turns = Turns()

    def second() -> str:
        try:
            with turns.launch(CPU):
                return ""
        except FastPathError as error:
            return str(error)

    with ThreadPoolExecutor(1) as pool:
        with turns.launch(CPU):
            assert "two threads" in pool.submit(second).result()
        assert pool.submit(second).result() == ""


class Stream:
    """What is asked of a stream of a GPU."""

    def __init__(self, name: str, done: list[tuple[str, str]]) -> None:
        self.name, self.done = name, done
        """`done`: which stream waits for which."""

    def record_event(self) -> str:
        return self.name

    def wait_event(self, event: str) -> None:
        self.done.append((self.name, event))


@pytest.mark.parametrize("captures", [False, True])
def test_a_call_on_a_different_stream_waits_for_the_one_before(captures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device; what a graph captures does not run yet."""
    done: list[tuple[str, str]] = []
    one, other = Stream("one", done), Stream("other", done)
    turns = Turns()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    for stream in (one, one, other, other, one):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device, stream=stream: stream)
        with turns.launch(CUDA):
            pass
    waits = [("other", "one"), ("one", "other")]
    assert done == ([] if captures else waits)


@pytest.mark.parametrize("captures", [False, True])
def test_what_closes_runs_behind_the_calls_so_far_and_never_in_a_capture(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    one, other, new = (Stream(name, done) for name in ("one", "other", "new"))
    turns, entered = Turns(), []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: one)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: new)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered.append(stream) or nullcontext())
    with turns.launch(CUDA):
        pass
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: other)
    with turns.behind(CUDA):
        pass
    assert (entered, done) == (([new], []) if captures else ([other], [("other", "one")]))


@pytest.mark.parametrize(("wait_s", "limits"), [(5.0, {"max_polls": 25_000_000}), (None, {})])
def test_how_long_kernels_wait_is_a_setting(
    wait_s: float | None, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(Exchange, "of_group", lambda _group, **given: made.append(given))
    shape = ShapeClass.of([(1, 8, 64)], torch.bfloat16, tp=2, variant="")
    decision = Decision(path="all_reduce_add_rms_norm", shape=shape, is_used=True, why="it was measured")
    site = fast_paths.Site("add_rms_norm", ((1, 8, 64),), exchanging="all_reduce_add_rms_norm")
    selection = SimpleNamespace(group=None)
    deciding = fast_paths._Deciding(selection, CPU, train=False, wait_s=wait_s)  # type: ignore[arg-type]
    deciding.decisions[decision.path] = decision
    deciding.exchange_of(decision.path, site)
    assert [{name: made[0][name] for name in limits}, "max_polls" in made[0]] == [limits, bool(limits)]
