"""Sends and receives are recorded on real gloo ranks; red when torch moves a name that this needs."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from tpcompile.sentinel import flight
from tpcompile.testing import run_on_ranks
from tpcompile.torch_api.point_to_point import Messages
from tpcompile.torch_api.watching import main_thread_frame


def _swap(other: int, *, is_reversed: bool = False) -> None:
    ops = [dist.P2POp(dist.isend, torch.ones(3), other), dist.P2POp(dist.irecv, torch.ones(3), other)]
    for work in dist.batch_isend_irecv(ops[::-1] if is_reversed else ops):
        work.wait()


def _posts() -> dict[str, Any]:
    rank = dist.get_rank()
    other, messages = 1 - rank, Messages()
    _swap(other)
    messages.install()
    _swap(other)
    with torch.inference_mode():
        _swap(other, is_reversed=rank == 1)
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.send(torch.ones(2, 2, dtype=torch.float64), 1, group=group)
    else:
        dist.recv(torch.ones(4, dtype=torch.float64), 0, group=group)
    ended = [one.has_ended for one in messages.posted()]
    messages.remove()
    messages.remove()
    _swap(other)
    told = [(one.op, one.peer, one.number, dict(one.content)) for one in flight.messages(messages.posted())]
    functions = [one.stack[-1].function for one in flight.messages(messages.posted())]
    batches = [one.is_in_batch for one in messages.posted()]
    return {"told": told, "ended": ended, "functions": functions, "batches": batches}


def test_messages_are_recorded_with_number_content_and_stack_until_they_are_removed() -> None:
    sender, receiver = run_on_ranks(_posts, timeout_s=60)
    three, four = {"elements": "3", "dtypes": "float32"}, {"elements": "4", "dtypes": "float64"}
    assert sender["told"] == [
        ("send", 1, 1, three), ("recv", 1, 1, three), ("send", 1, 2, three), ("recv", 1, 2, three), ("send", 1, 3, four)
    ]  # fmt: skip
    assert receiver["told"] == [
        ("send", 0, 1, three), ("recv", 0, 1, three), ("recv", 0, 2, three), ("send", 0, 2, three), ("recv", 0, 3, four)
    ]  # fmt: skip
    assert sender["ended"] == receiver["ended"] == [True] * 5
    assert sender["functions"] == ["_swap"] * 4 + ["_posts"]
    assert sender["batches"] == [True] * 4 + [False]


def _posts_with_tags() -> list[tuple[int, int, int]]:
    messages = Messages()
    messages.install()
    for tag in (1, 2, 2):
        if dist.get_rank() == 0:
            dist.send(torch.ones(3), 1, tag=tag)
        else:
            dist.recv(torch.ones(3), 0, tag=tag)
    messages.remove()
    return [(one.number, one.tag, one.number_of_tag) for one in flight.messages(messages.posted())]


def test_messages_are_counted_by_the_tag_that_gloo_takes_them_by() -> None:
    assert run_on_ranks(_posts_with_tags, timeout_s=60) == [[(1, 1, 1), (2, 2, 1), (3, 2, 2)]] * 2


def _posts_what_cannot_be_read() -> int:
    messages = Messages()
    messages._keep = None  # type: ignore[method-assign, assignment]
    messages.install()
    _swap(1 - dist.get_rank())
    messages.remove()
    return len(messages.posted())


def test_a_message_that_cannot_be_recorded_is_sent_all_the_same() -> None:
    assert run_on_ranks(_posts_what_cannot_be_read, timeout_s=60) == [0, 0]


def _waits() -> list[str]:
    """What is seen from another thread of a receive for which nothing was sent, and of one that the program leaves."""
    messages, seen = Messages(), []
    messages.install()
    main = threading.get_ident()

    def look() -> None:
        for _ in range(2):
            time.sleep(1)
            frame = main_thread_frame(main)
            is_held = flight.is_blocked(frame)
            seen.append(str(flight.point_to_point(frame, messages.posted(), is_held=is_held)))
            time.sleep(0.5)
            if dist.get_rank() == 0:
                dist.send(torch.ones(1), 1)

    watcher = threading.Thread(target=look)
    watcher.start()
    if dist.get_rank() == 1:
        work = dist.irecv(torch.ones(1), 0)
        work.wait()  # 1.5 s
        dist.irecv(torch.ones(1), 0)
        time.sleep(2)
    watcher.join()
    messages.remove()
    return [text.partition(" at ")[0] for text in seen]


def test_a_receive_that_is_waited_for_is_seen_and_one_that_is_left_alone_is_not() -> None:
    _, receiver = run_on_ranks(_waits, timeout_s=60)
    assert receiver == ["recv from rank 0", "None"]
