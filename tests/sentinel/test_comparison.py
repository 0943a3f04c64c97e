"""What a rank publishes about its calls while it runs, and when it leaves."""

from __future__ import annotations

from typing import Any

from tpcompile.sentinel.agreed_values import AgreedValues
from tpcompile.sentinel.agreement import Links
from tpcompile.sentinel.comparison import Comparison
from tpcompile.sentinel.counter_samples import Counted
from tpcompile.sentinel.progress import Progress


class Log:
    """Keeps what one of four ranks publishes, and which ranks it asks."""

    rank, members = 1, (0, 1, 2, 3)

    def __init__(self) -> None:
        self.said: list[dict[str, Counted]] = []
        self.asked: list[list[int]] = []
        self.links: list[Links] = []

    def say_counted(self, counted: dict[str, Counted]) -> None:
        self.said.append(counted)

    def say_links(self, links: Links) -> None:
        self.links.append(links)

    def counted_on(self, ranks: list[int]) -> dict[int, dict[str, Counted]]:
        self.asked.append(list(ranks))
        return {}


def test_a_tick_of_the_timer_does_not_take_back_that_a_rank_has_left() -> None:
    log: Any = Log()
    progress = Progress(lambda _: None)
    region = progress.enter(progress.region("f"))
    region.variants["0/0"] = region.position.key
    comparison = Comparison(log, progress, AgreedValues("tp", log.members), on=lambda _: None)
    comparison.with_the_next()
    comparison.at_the_end()
    comparison.with_the_next()
    assert [counted["f"].is_over for counted in log.said] == [False, True, True]
    assert log.asked == [[2], [0, 2], [2]], "neighbours only: the cost does not grow with the number of ranks"
