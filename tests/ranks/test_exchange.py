from __future__ import annotations

import base64
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import JsonValue

from tests.gate.threads import CountingStore, on_threads, stores
from tpcompile import config
from tpcompile.evidence.records import CheckId, CompileRecord, InputTensor, Layer, RankRecord, Status, Verdict
from tpcompile.evidence.rundir import RankStatus, RunDir
from tpcompile.evidence.timeline.flow import Flow
from tpcompile.gate.replay import gate_rules
from tpcompile.gate.status import StatusBoard
from tpcompile.ranks import exchange as exchange_module
from tpcompile.ranks.exchange import Ask, Exchange, Side, _Published
from tpcompile.ranks.liveness import this_host
from tpcompile.ranks.recorded import record_side

RULES = gate_rules(config.load("cpu_smoke"))


@pytest.fixture(autouse=True)
def _short_waits_for_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_DETAIL_TIMEOUT_S", 2.0)


def record(rank: int, world_size: int, shape: str = "[1, 16]") -> RankRecord:
    """A rank that compiled one frame with one input."""
    tensor = InputTensor(source="L['x']", dtype="f32", shape=shape, stride="[16, 1]", device="cpu")
    compile_ = CompileRecord(compile_id="0/0", phase="C/first", function="forward", inputs=(tensor,))
    return RankRecord(rank=rank, world_size=world_size, compiles=(compile_,))


def exchange(
    store: CountingStore, folder: Path, *, shape: str = "[1, 16]", timeout_s: float = 20, state: str = "running"
) -> Verdict | None:
    """This rank's side of one exchange."""
    board = StatusBoard(RunDir.create(folder), store)
    board.publish(state)
    side = record_side(record(store.rank, store.world_size, shape), RULES)
    return Exchange(store, range(store.world_size), others=board, timeout_s=timeout_s).verdict(side)


def test_all_ranks_get_the_verdict_of_rank_0(tmp_path: Path) -> None:
    clients = stores(3)
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path), range(3))
    assert verdicts[0] == verdicts[1] == verdicts[2]
    assert verdicts[0].domains == {"tp": ((0, 1, 2),)}
    assert [c.rank for c in clients if "verdict" in c.claimed] == [0]


def publish(store: CountingStore, shape: str = "[1, 16]") -> _Published:
    """The digest of a rank that does no more than that."""
    return _Published(store, record_side(record(store.rank, store.world_size, shape), RULES))


def test_equal_digests_cost_one_message_per_rank_and_no_details(tmp_path: Path) -> None:
    clients = stores(3)
    on_threads(lambda rank: exchange(clients[rank], tmp_path), range(3))
    written = [key for client in clients for key in client.written if not key.startswith("status/")]
    assert sorted(key.partition("/")[0] for key in written) == ["common", "digest", "digest", "digest"]


def sizes(clients: list[CountingStore], folder: Path, odd: int = -1) -> Counter[str]:
    """Bytes that one exchange puts, by the first part of the key, and questions."""
    on_threads(
        lambda rank: exchange(clients[rank], folder, shape="[1, 12]" if rank == odd else "[1, 16]"), range(len(clients))
    )
    return sum((client.sizes for client in clients), Counter[str]())


@pytest.mark.parametrize("odd", [-1, 5])
def test_what_an_exchange_puts_grows_with_the_ranks_not_their_square(odd: int, tmp_path: Path) -> None:
    few, many = (sizes(stores(number), tmp_path / str(number), odd) for number in (8, 32))
    assert many["digest"] < 4.5 * few["digest"]
    assert many["common"] <= few["common"] + 8 and many["ask"] <= few["ask"] + 8
    assert 0 < many["verdict"] < 1.5 * few["verdict"] and many["answer"] <= few["answer"] + 8


def test_an_exchange_leaves_no_key_behind_once_all_have_read_the_verdict(tmp_path: Path) -> None:
    clients = stores(4)
    shapes = ["[1, 16]", "[1, 12]", "[1, 16]", "[1, 12]"]
    on_threads(lambda rank: exchange(clients[rank], tmp_path, shape=shapes[rank]), range(4))
    clients[0].delete(*(f"status/{rank}" for rank in range(4)))
    assert clients[0]._store.num_keys() == 0


def test_a_verdict_stays_until_all_ranks_have_read_it(tmp_path: Path) -> None:
    clients = stores(3)
    on_threads(lambda rank: exchange(clients[rank], tmp_path, timeout_s=0.5), [0, 1])
    assert clients[0].has("verdict")
    late = exchange(clients[2], tmp_path)
    assert late is not None and [c.ranks for c in late.checks if c.id == CheckId.REPORTED] == [(2,)]
    assert not clients[0].has("verdict")


def test_a_judge_that_dies_after_it_began_is_replaced_and_named(tmp_path: Path) -> None:
    clients = stores(4)
    publish(clients[0], "[1, 12]")
    clients[0].put_first("judge/0", 0, int)
    clients[0].put("ask/0/1/1", {"index": 0, "layer": "inputs", "part": ""})  # its first question, then it died
    board = StatusBoard(RunDir.create(tmp_path), clients[0])
    dead = RankStatus(rank=0, world_size=4, pid=2**22 + 1, host="", namespace=this_host(), phase="C/first", state="")
    clients[0].put("status/0", dead.model_dump(mode="json"))
    assert board.is_gone(0)
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path), [1, 2, 3])
    assert verdicts[0] == verdicts[1] == verdicts[2]
    (found,) = verdicts[0].divergences
    assert [group.ranks for group in found.groups] == [(1, 2, 3), (0,)]  # judged by its hash
    assert sum("verdict" in client.claimed for client in clients) == 1


def test_a_judge_whose_process_is_not_known_is_replaced_by_a_rank_of_its_host(tmp_path: Path) -> None:
    clients = stores(3)
    publish(clients[0])
    clients[0].put_first("judge/0", 0, int)

    class OtherHost:
        def last_seen(self, rank: int) -> str:
            return "unknown"

        def is_gone(self, rank: int) -> bool:
            return False

    class SameHost(OtherHost):
        def is_gone(self, rank: int) -> bool:
            return rank == 0

    def run(rank: int) -> Verdict | None:
        others = SameHost() if rank == 2 else OtherHost()
        side = record_side(record(rank, 3), RULES)
        return Exchange(clients[rank], range(3), others=others, timeout_s=20).verdict(side)

    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(exchange_module, "_LOOKS_S", 0.05)
        verdicts = on_threads(run, [1, 2])
    assert verdicts[0] == verdicts[1] and verdicts[0] is not None
    assert [client.rank for client in clients if "verdict" in client.claimed] == [2]


def test_the_rank_that_died_before_it_wrote_what_is_in_common_is_replaced_by_one_like_it(tmp_path: Path) -> None:
    clients = stores(3)
    sha = publish(clients[2], "[1, 12]").entry.sha
    clients[2].delete(f"common/{sha}", "digest/2")
    shapes = ["[1, 16]", "[1, 12]"]
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path, shape=shapes[rank], timeout_s=1), [0, 1])
    assert [d.layer for d in verdicts[0].divergences] == [Layer.INPUTS]


@pytest.mark.parametrize("raw", ["{", "{}", '{"compiles": []}', "[]"])
def test_what_is_in_common_must_be_that_of_its_hash(raw: str, tmp_path: Path) -> None:
    clients = stores(2)
    sha = publish(clients[1], "[1, 12]").entry.sha
    clients[1]._store.set(f"common/{sha}", raw)
    shapes = ["[1, 16]", "[1, 12]"]
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path, shape=shapes[rank]), range(2))
    assert [d.layer for d in verdicts[0].divergences] == [Layer.INPUTS]


def test_peers_cannot_make_the_judge_read_more_than_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_MAX_READ_BYTES", 10_000)
    clients = stores(3)
    own = {"rank": 2, "facts": "x" * 20_000}
    clients[2].put("digest/2", {"rank": 2, "sha": "0" * 64, "own": own})
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path), range(2))
    (missing,) = [check for check in verdicts[0].checks if check.id == CheckId.REPORTED]
    assert missing.ranks == (2,) and re.search(r"2\d{4} bytes, .* 10000 ", missing.observed)


@pytest.mark.parametrize("bomb", [zlib.compress(bytes(9 << 20)), b"not zlib", zlib.compress(b"[" * 100_000)])
def test_a_verdict_that_cannot_be_unpacked_is_none(bomb: bytes, tmp_path: Path) -> None:
    judge, other = stores(2)
    publish(judge)
    judge._store.set("verdict", f"zlib {base64.b64encode(bomb).decode()}")
    assert exchange(other, tmp_path) is None


def test_details_are_asked_only_where_hashes_differ(tmp_path: Path) -> None:
    clients = stores(3)
    shapes = ["[1, 16]", "[1, 16]", "[1, 12]"]
    verdict = on_threads(lambda rank: exchange(clients[rank], tmp_path, shape=shapes[rank]), range(3))[0]
    assert [(d.layer, [g.ranks for g in d.groups]) for d in verdict.divergences] == [(Layer.INPUTS, [(0, 1), (2,)])]
    assert "[1, 12]" in verdict.divergences[0].title
    answered = [[key for key in client.written if key.startswith("answer/")] for client in clients]
    assert answered == [[], [], ["answer/0/2/1"]]


def test_rank_that_does_not_report_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    clients = stores(3)
    StatusBoard(RunDir.create(tmp_path), clients[1]).enter("C/steady")
    verdict = on_threads(lambda rank: exchange(clients[rank], tmp_path, timeout_s=0.5), [0, 2])[0]
    missing = next(c for c in verdict.checks if c.id == CheckId.REPORTED)
    assert (missing.status, missing.ranks) == (Status.FAIL, (1,))
    assert re.search("running .*C/steady", missing.observed)


def test_lowest_rank_that_reported_judges_when_rank_0_is_missing(tmp_path: Path) -> None:
    clients = stores(3)
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path, timeout_s=0.5), [1, 2])
    assert verdicts[0] == verdicts[1]
    assert [c.rank for c in clients if "verdict" in c.claimed] == [1]
    assert [c.ranks for c in verdicts[0].checks if c.id == CheckId.REPORTED] == [(0,)]
    assert "never" in verdicts[0].summary


def test_all_ranks_get_one_verdict_where_one_takes_a_live_judge_for_dead(tmp_path: Path) -> None:
    clients = stores(2)

    class Wrong:
        def last_seen(self, rank: int) -> str:
            return "unknown"

        def is_gone(self, rank: int) -> bool:
            return rank == 0

    def run(rank: int) -> Verdict | None:
        if rank == 0:
            return exchange(clients[0], tmp_path)
        side = record_side(record(1, 2, "[1, 12]"), RULES)
        return Exchange(clients[1], range(2), others=Wrong(), timeout_s=20).verdict(side)

    verdicts = on_threads(run, range(2))
    assert verdicts[0] == verdicts[1] and verdicts[0] is not None


def test_judge_that_falls_silent_leaves_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_DETAIL_TIMEOUT_S", 0.1)
    judge, other = stores(2)
    publish(judge)
    assert exchange(other, tmp_path, timeout_s=0.1) is None


def test_what_a_rank_executed_that_was_killed_since_it_gave_its_digest_is_read_from_what_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_DETAIL_TIMEOUT_S", 0.1)
    judge, silent = stores(2)
    publish(silent, "[1, 12]")
    read: list[int] = []
    side = record_side(record(0, 2), RULES, flow_of=lambda rank: read.append(rank) or Flow())
    board = StatusBoard(RunDir.create(tmp_path), judge)
    assert Exchange(judge, range(2), others=board, timeout_s=20).verdict(side) is not None
    assert read == [0, 1]


def test_rank_that_does_not_answer_a_question_is_still_judged_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_DETAIL_TIMEOUT_S", 0.1)
    judge, silent = stores(2)
    publish(silent, "[1, 12]")
    verdict = exchange(judge, tmp_path)
    assert verdict is not None
    assert [d.layer for d in verdict.divergences] == [Layer.INPUTS]


def test_a_rank_that_left_one_question_unanswered_is_not_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_DETAIL_TIMEOUT_S", 0.1)
    judge, *silent = stores(3)
    for store in silent:
        _Published(store, Side({}, str, lambda *_: None, kind=JsonValue, question=JsonValue))
    answers: list[object] = []

    def asks(found: dict[int, Any], absent: dict[int, str], fetch: Ask) -> Verdict:
        answers.extend(fetch(rank, {}, str) for rank in (1, 1, 2, 0, 1))
        return Verdict(status=Status.PASS, exit_code=0, world_size=3, summary="")

    side = Side(digest={}, answer=lambda question: "own", judge=asks, kind=JsonValue, question=JsonValue)
    board = StatusBoard(RunDir.create(tmp_path), judge)
    assert Exchange(judge, range(3), others=board, timeout_s=1).verdict(side) is not None
    assert answers == [None, None, None, "own", None]
    assert [key for key in judge.written if key.startswith("ask/")] == ["ask/0/1/1", "ask/0/2/1"]


NOT_VALID = ("{", "[]", '{"rank": 7}', '{"rank": 0}')


@pytest.mark.parametrize("raw", NOT_VALID)
def test_a_digest_that_is_not_valid_is_a_finding_with_its_rank(raw: str, tmp_path: Path) -> None:
    judge, other, forging = stores(3)
    forging._store.set("digest/2", raw)
    verdict = on_threads(lambda rank: exchange((judge, other)[rank], tmp_path), range(2))[0]
    (missing,) = [check for check in verdict.checks if check.id == CheckId.REPORTED]
    assert (missing.status, missing.ranks) == (Status.FAIL, (2,))
    assert "not valid" in missing.observed


def test_the_digest_of_a_rank_at_the_key_of_a_different_one_is_a_finding(tmp_path: Path) -> None:
    judge, other = stores(2)
    entry = publish(other).entry
    other.put("digest/1", {**entry.model_dump(mode="json"), "rank": 0})
    verdict = exchange(judge, tmp_path)
    assert verdict is not None
    (missing,) = [check for check in verdict.checks if check.id == CheckId.REPORTED]
    assert missing.ranks == (1,) and "rank: it says 0" in missing.observed


def test_the_digest_of_this_rank_is_its_own_whatever_the_store_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge, other = stores(2)
    publish(other)
    put = judge.put

    def forged(key: str, value: Any) -> None:
        put(key, {"rank": 1} if key == "digest/0" else value)

    monkeypatch.setattr(judge, "put", forged)
    verdict = exchange(judge, tmp_path)
    assert verdict is not None
    assert verdict.domains == {"tp": ((0, 1),)}
    assert not any(check.is_red for check in verdict.checks if check.id == CheckId.REPORTED)


@pytest.mark.parametrize("raw", ["{", "[]", '{"index": 10000, "layer": "graph", "part": ""}', '{"index": "x"}'])
def test_a_question_that_is_not_valid_is_answered_and_the_next_one_too(raw: str, tmp_path: Path) -> None:
    judge, asked = stores(2)
    judge._store.set("ask/0/1/1", raw)
    judge.put("ask/0/1/2", {"index": 0, "layer": "inputs", "part": ""})
    publish(judge)
    verdict = Verdict(status=Status.PASS, exit_code=0, world_size=2, summary="equal")

    def judges(rank: int) -> object:
        if rank == 1:
            return exchange(asked, tmp_path)
        answer = judge.get("answer/0/1/2", JsonValue, timeout_s=20)
        judge.put("verdict", verdict.model_dump(mode="json"))
        return answer

    answer, found = on_threads(judges, range(2))
    assert found == verdict and answer[0]["fields"]["shape"] == "[1, 16]"
    assert judge.peek("answer/0/1/1", JsonValue) in ([], None)


@pytest.mark.parametrize("raw", ["{", "[]", '{"exit_code": 1}', '{"status": "pass", "exit_code": 77}'])
def test_a_verdict_that_is_not_valid_is_none_and_nothing_waits_for_it(raw: str, tmp_path: Path) -> None:
    judge, other = stores(2)
    publish(judge)
    judge._store.set("verdict", raw)
    assert exchange(other, tmp_path) is None


@pytest.mark.parametrize("raw", ["{", "7", '"0"'])
def test_a_judge_that_is_none_of_the_ranks_is_replaced(raw: str, tmp_path: Path) -> None:
    clients = stores(2)
    clients[0]._store.set("judge/0", raw)
    verdicts = on_threads(lambda rank: exchange(clients[rank], tmp_path), range(2))
    assert verdicts[0] == verdicts[1] and verdicts[0].domains == {"tp": ((0, 1),)}


@pytest.mark.parametrize("raw", ["{", '{"about": 1}', '[{"kind": "unknown"}]'])
def test_details_that_are_not_valid_are_none(raw: str, tmp_path: Path) -> None:
    judge, silent = stores(2)
    publish(silent, "[1, 12]")
    for number in range(1, 4):
        silent._store.set(f"answer/0/1/{number}", raw)
    verdict = exchange(judge, tmp_path)
    assert verdict is not None and [d.layer for d in verdict.divergences] == [Layer.INPUTS]
