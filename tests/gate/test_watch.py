from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.gate.threads import stores
from tpcompile.errors import ExitCode
from tpcompile.evidence.records import Check, CheckId, Status
from tpcompile.gate import watch as watch_module
from tpcompile.gate.watch import ALARM, Watch
from tpcompile.ranks.store import RankStore

# Leaving the process is replaced by leaving the thread, which pytest would tell of.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

TROUBLE = Check(id=CheckId.NO_ERROR, mode="C", status=Status.FAIL, expected="", observed="rank 1 gave up", ranks=(1,))


def num_open_files() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


class Ending:
    """Stands in for the last words and for the process that then ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.checks: list[Check] = []
        self.codes: list[int] = []
        self.left = threading.Event()
        self.speak: Callable[[], None] = lambda: None
        monkeypatch.setattr(watch_module.os, "_exit", self.leave)

    def last_words(self, check: Check) -> ExitCode:
        self.checks.append(check)
        self.speak()
        return ExitCode.FAIL

    def leave(self, code: int) -> None:
        self.codes.append(code)
        self.left.set()
        raise SystemExit  # ends this thread, quietly

    def wait(self) -> Check:
        """What the watch ended with."""
        assert self.left.wait(20), "the watch did not end the process"
        assert len(self.codes) == 1
        assert len(self.checks) == 1
        return self.checks[0]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    return Ending(monkeypatch)


def test_alarm_of_a_different_rank_ends_this_one_with_its_check(ending: Ending) -> None:
    mine, theirs = stores(2)
    with Watch(mine, ending.last_words, mode="C"):
        theirs.put(ALARM, TROUBLE.model_dump(mode="json"))
        assert ending.wait() == TROUBLE
    assert ending.codes == [ExitCode.FAIL]


def test_sigterm_ends_the_run_even_though_the_main_thread_is_busy(ending: Ending) -> None:
    with Watch(stores(1)[0], ending.last_words, mode="C"):
        os.kill(os.getpid(), signal.SIGTERM)
        check = ending.wait()
    assert (check.id, "SIGTERM" in check.observed) == (CheckId.ALIVE, True)


def test_phase_that_takes_too_long_ends_the_run_and_is_named(ending: Ending) -> None:
    with Watch(stores(1)[0], ending.last_words, mode="C") as watch:
        watch.deadline("C/first", 0.0)
        check = ending.wait()
    assert check.id == CheckId.TIMED_OUT
    assert "phase C/first" in check.observed


def test_rank_that_died_ends_the_run_and_is_named_unless_an_alarm_says_why(ending: Ending) -> None:
    seen = {1: "running in phase C/first on vm; its process 7 died"}
    with Watch(stores(1)[0], ending.last_words, mode="C", died=lambda: seen):
        check = ending.wait()
    assert (check.id, check.ranks) == (CheckId.ALIVE, (1,))
    assert seen[1] in check.observed


def test_alarm_of_a_rank_that_then_died_is_the_cause(ending: Ending) -> None:
    mine, theirs = stores(2)
    theirs.put(ALARM, TROUBLE.model_dump(mode="json"))
    with Watch(mine, ending.last_words, mode="C", died=lambda: {1: "running"}):
        assert ending.wait() == TROUBLE


def test_store_that_went_down_ends_the_run(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: RankStore, *args: object) -> None:
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(RankStore, "peek", refuse)
    monkeypatch.setattr(RankStore, "put_first", refuse)
    with Watch(stores(1)[0], ending.last_words, mode="C"):
        assert "store" in ending.wait().observed


def test_first_alarm_is_the_cause_on_every_rank(ending: Ending) -> None:
    first, second = stores(2)
    first.put(ALARM, TROUBLE.model_dump(mode="json"))
    later = TROUBLE.model_copy(update={"observed": "I noticed it later"})
    with pytest.raises(SystemExit):
        Watch(second, ending.last_words, mode="C").end(later)
    assert ending.wait() == TROUBLE


def test_last_words_that_fail_do_not_keep_the_process(ending: Ending) -> None:
    ending.speak = lambda: 1 // 0
    with pytest.raises(SystemExit):
        Watch(stores(1)[0], ending.last_words, mode="C").end(TROUBLE)
    assert ending.codes == [ExitCode.FAIL]


def test_watch_that_has_stopped_ends_nothing_and_leaves_signals_as_they_were(ending: Ending) -> None:
    store = stores(1)[0]
    handler, threads, files = signal.getsignal(signal.SIGTERM), threading.active_count(), num_open_files()
    with Watch(store, ending.last_words, mode="C") as watch:
        watch.stop()
        store.put(ALARM, TROUBLE.model_dump(mode="json"))
    assert ending.codes == []
    assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.set_wakeup_fd(-1) == -1
    assert threading.active_count() == threads
    assert num_open_files() == files


def test_stop_does_not_wait_for_the_next_look(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_POLL_S", 1000.0)
    with Watch(stores(1)[0], ending.last_words, mode="C") as watch:
        watch.stop()
    assert ending.codes == []


def test_sigterm_while_the_verdict_is_written_is_not_heard(ending: Ending, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_on: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: passed_on.append(number))
    with Watch(stores(1)[0], ending.last_words, mode="C") as watch:
        watch.stop()
        signal.raise_signal(signal.SIGTERM)  # torchrun ends the ranks that are not done yet
    assert (ending.codes, passed_on) == ([], [])


def test_stop_waits_for_a_watch_that_is_already_ending_the_run(ending: Ending) -> None:
    store, said = stores(2)[0], threading.Event()
    ending.speak = lambda: said.wait(20) and None
    with Watch(store, ending.last_words, mode="C") as watch:
        store.put(ALARM, TROUBLE.model_dump(mode="json"))
        deadline = time.monotonic() + 20
        while not ending.checks and time.monotonic() < deadline:
            pass
        said.set()
        watch.stop()
        assert ending.codes == [ExitCode.FAIL]
