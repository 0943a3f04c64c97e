"""Positions, the progress that ranks can compare, and which rank passed which."""

from __future__ import annotations

import threading

import pytest

from tpcompile.sentinel.counter_samples import COLLECTIVES
from tpcompile.sentinel.messages import Announcement, Position
from tpcompile.sentinel.progress import Progress


@pytest.fixture
def passed() -> list[Announcement]:
    return []


@pytest.fixture
def progress(passed: list[Announcement]) -> Progress:
    return Progress(passed.append)


def announcement(call: int, index: int = 0, region: str = "f") -> Announcement:
    return Announcement(rank=1, position=Position(region=region, call=call, index=index), compile_id="0/1")


def test_a_first_compile_is_at_the_first_frame_of_the_first_call(progress: Progress) -> None:
    progress.enter(progress.region("f"))
    assert progress.compile_starts("0/0") == Position(region="f", call=1, index=0)


def test_a_recompile_is_at_the_frame_whose_guards_missed(progress: Progress) -> None:
    progress.enter(progress.region("f"))
    progress.compile_starts("0/0")
    progress.enter(progress.region("f"))
    progress.lookup(True)
    progress.lookup(False)
    assert progress.compile_starts("0/1") == Position(region="f", call=2, index=1)


def test_a_hit_where_a_different_rank_compiles_is_a_pass(progress: Progress, passed: list[Announcement]) -> None:
    progress.enter(progress.region("f"))
    passed.extend(progress.announce(announcement(call=1)))
    assert passed == []
    progress.lookup(True)
    assert passed == [announcement(call=1)]


def test_compiling_where_a_different_rank_compiles_is_no_pass(progress: Progress, passed: list[Announcement]) -> None:
    progress.enter(progress.region("f"))
    passed.extend(progress.announce(announcement(call=1)))
    progress.lookup(False)
    progress.compile_starts("0/1")
    progress.enter(progress.region("f"))
    assert passed == []
    assert progress.pending == {}


def test_a_rank_that_is_behind_has_not_passed(progress: Progress, passed: list[Announcement]) -> None:
    progress.enter(progress.region("f"))
    progress.lookup(True)
    passed.extend(progress.announce(announcement(call=3)))
    progress.enter(progress.region("f"))
    progress.lookup(True)
    assert passed == []
    progress.enter(progress.region("f"))
    assert passed == []
    progress.lookup(True)
    assert passed == [announcement(call=3)]


def test_a_rank_that_was_ahead_when_it_heard_has_passed_at_once(progress: Progress, passed: list[Announcement]) -> None:
    for _ in range(4):
        progress.enter(progress.region("f"))
        progress.lookup(True)
    passed.extend(progress.announce(announcement(call=2)))
    assert passed == [announcement(call=2)]


def test_a_compile_made_before_the_news_came_is_no_pass(progress: Progress, passed: list[Announcement]) -> None:
    progress.enter(progress.region("f"))
    progress.compile_starts("0/0")
    progress.enter(progress.region("f"))
    passed.extend(progress.announce(announcement(call=1)))
    assert passed == []


def test_the_first_frame_may_hit_while_a_later_one_compiles_everywhere(
    progress: Progress, passed: list[Announcement]
) -> None:
    progress.enter(progress.region("f"))
    progress.lookup(True)
    passed.extend(progress.announce(announcement(call=1, index=1)))
    progress.lookup(False)
    progress.compile_starts("1/1")
    progress.enter(progress.region("f"))
    assert passed == []


def test_a_miss_that_no_compile_follows_counts_as_a_frame_that_ran_eagerly(
    progress: Progress, passed: list[Announcement]
) -> None:
    progress.enter(progress.region("f"))
    passed.extend(progress.announce(announcement(call=1)))
    progress.lookup(False)
    assert passed == []
    progress.lookup(True)
    assert passed == [announcement(call=1)]


def test_the_end_of_a_watched_call_passes_all_its_frames(progress: Progress, passed: list[Announcement]) -> None:
    region = progress.enter(progress.region("f"))
    passed.extend(progress.announce(announcement(call=1, index=5)))
    progress.leave(region)
    assert passed == [announcement(call=1, index=5)]


def test_regions_are_counted_apart(progress: Progress, passed: list[Announcement]) -> None:
    passed.extend(progress.announce(announcement(call=1, region="g")))
    for _ in range(3):
        progress.enter(progress.region("f"))
        progress.lookup(True)
    assert passed == []


def test_every_event_is_progress(progress: Progress) -> None:
    before = progress.ticks
    progress.enter(progress.region("f"))
    progress.lookup(True)
    assert progress.ticks == before + 2


@pytest.mark.parametrize("missed", [False, True])
def test_a_call_that_hits_is_recorded_in_one_step_as_in_two(missed: bool) -> None:
    seen = []
    for at_once in (False, True):
        passed: list[Announcement] = []
        progress = Progress(passed.append)
        region = progress.region("f")
        progress.enter(region)
        progress.lookup(not missed)
        for call, index in ((1, 0), (1, 1), (2, 0), (2, 1)):
            passed.extend(progress.announce(announcement(call, index)))
        if at_once:
            progress.enter(region, 1)
        else:
            progress.enter(region)
            progress.lookup(True)
        assert progress.current is region and progress.ticks > 2
        seen.append((region.position, passed, progress.pending))
    assert seen[0] == seen[1]
    assert [a.position.key for a in seen[0][1]] == ["f/1.0", "f/1.1", "f/2.0"]


def test_a_variant_is_known_by_where_it_was_compiled_for_its_hash_may_be_the_ranks_own() -> None:
    ranks = []
    for shard in ("0/0", "3/1"):
        progress = Progress(lambda _: None)
        region = progress.enter(progress.region("f"))
        position = progress.compile_starts(shard)
        region.keep(position, shard)
        ranks.append(set(region.variants.values()))
    assert ranks[0] == ranks[1] == {"f/1.0"}


def local_announcement(call: int, num_issued: int) -> Announcement:
    """A compile in a region without collectives, between that collective of the program and the next."""
    return announcement(call).model_copy(update={"num_issued": num_issued})


def test_a_compile_without_collectives_is_passed_with_the_next_collective_not_with_the_call() -> None:
    """This rank has called the region twice more, in an evaluation: its calls have other numbers."""
    passed: list[Announcement] = []
    issued = [4]
    progress = Progress(passed.append, counters=lambda: {f"{COLLECTIVES}tp": issued[0], "`step` in main": 3})
    region = progress.region("f")
    for _ in range(5):
        progress.enter(region, 1)
    found = local_announcement(call=3, num_issued=4)
    assert progress.announce(found) == []
    progress.enter(region, 1)
    assert passed == []
    issued[0] = 5
    progress.enter(region, 1)
    assert passed == [found]
    progress.enter(region, 1)
    assert progress.announce(local_announcement(call=20, num_issued=4)) == [], "a rank that is behind has not passed"


def compiled_between() -> Progress:
    """A rank that has compiled once after the fourth collective, and has issued five more since."""
    issued = [4]
    progress = Progress(lambda _: None, counters=lambda: {f"{COLLECTIVES}tp": issued[0], "`step` in main": 3})
    region = progress.region("f")
    for _ in range(5):
        progress.enter(region, 1)
    progress.compile_starts("0/1")
    issued[0] = 9
    progress.enter(region, 1)
    return progress


def test_a_compile_between_the_same_collectives_is_the_same_whatever_the_number_of_its_call() -> None:
    progress = compiled_between()
    assert progress.announce(local_announcement(call=3, num_issued=4)) == []
    other = local_announcement(call=3, num_issued=5)
    assert progress.announce(other) == [other], "negative control: compiled before that collective, not after it"


@pytest.mark.parametrize(("between", "is_passed"), [(1, False), (2, True)])
def test_a_second_compile_between_the_same_collectives_is_not_the_one_that_this_rank_made(
    between: int, is_passed: bool
) -> None:
    """Both have compiled for an evaluation; the other rank then compiles its train step, too."""
    progress = compiled_between()
    found = local_announcement(call=3, num_issued=4).model_copy(update={"between": between})
    assert progress.announce(found) == [found] * is_passed


def test_a_rank_that_is_behind_comes_to_the_collective_before_it_says_what_it_compiled() -> None:
    issued = [4]
    progress = Progress(lambda _: None, counters=lambda: {f"{COLLECTIVES}tp": issued[0]})
    assert not progress.comes_past(4, limit_s=0.1), "the negative control: it does not go on"
    thread = threading.Timer(0.2, lambda: issued.__setitem__(0, 5))
    thread.start()
    assert progress.comes_past(4, limit_s=20)
    thread.join()


def test_compiles_are_compared_up_to_the_same_collective() -> None:
    issued = [0]
    progress = Progress(lambda _: None, counters=lambda: {f"{COLLECTIVES}tp": issued[0], "`step` in main": 3})
    region = progress.region("f")
    for number in range(4):
        issued[0] = number
        progress.enter(region)
        region.ended.add(progress.compile_starts(f"0/{number}").place)
    progress.compile_starts("0/4")  # which has not ended
    second = Position(region="f", call=2, index=0)
    assert progress.compiled_until(second) == {"0/0", "0/1"}
    assert progress.compiled_until(second, 2) == {"0/0", "0/1", "0/2"}
