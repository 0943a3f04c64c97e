"""Kernels that exchange with their peers: the same as plain code on joined data, and what breaks the protocol."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.forked import Ended, run_python
from tpcompile.errors import FastPathError
from tpcompile.fastpath.kernels import closing
from tpcompile.fastpath.kernels.all import all_reduce_norm, qk_exchange
from tpcompile.fastpath.kernels.exchange_memory import Exchange, num_words

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
"""The first test runs all scenarios."""
LATE = "of the group did not arrive at exchange"


class Found(dict[str, Any]):
    """What the scenarios gave, by name; one that gave nothing fails the tests that look at it."""

    def __init__(self, ended: Ended) -> None:
        super().__init__()
        self.why = f"the process of the scenarios ended with {ended.returncode}: {ended.stderr}"
        for line in ended.stdout.splitlines():
            self |= json.loads(line)

    def __missing__(self, name: str) -> Any:
        pytest.fail(f"scenario {name} gave nothing; {self.why}")


@pytest.fixture(scope="module")
def found() -> Found:
    """All scenarios, in one process, which imports Triton as an interpreter."""
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    return Found(run_python(["-m", "tests.fastpath.late_ranks"], environ=environ, timeout_s=800))  # 18 s of CPU


def test_they_equal_the_plain_code_on_joined_data(found: Found) -> None:
    """2, 4 and 8 ranks, all element types, uneven and grouped heads, more rows than programs, no tokens."""
    assert len(found["equal"]) == 15
    assert all(max(errors) <= 1 for errors in found["equal"].values()), found["equal"]


def test_two_exchanges_in_turn_under_skew_are_right_every_time(found: Found) -> None:
    assert found["repeated"] == [{"off": 0, "checks": ["", "", ""]}] * 3


def test_a_rank_that_is_killed_ends_the_others_in_time_and_is_named(found: Found) -> None:
    first, killed, last = found["killed"]
    assert killed.endswith(" -9")
    for waited in (first, last):
        assert waited["check"].startswith(f"rank 1 {LATE} 3 "), waited
        waiting, later = waited["looks"]
        assert waited["is_nan"] and 200 <= waiting < 205 and later < 5, waited  # once a wait has run out, nothing waits


def test_what_ranks_refuse_before_their_launch_is_named_by_the_rank_that_waits(found: Found) -> None:
    """In eager and in compiled code; the wait has no limit. Without the store only the first rank is known."""
    right, eager, compiled = found["refused"]
    assert eager["raised"] == REASONS["a partial sum in float16"]
    assert compiled["raised"].startswith("all_reduce_norm: partial is [2, 24], and [1, 24] ")
    assert right["raised"] == "" and re.match(rf"rank [12] {REFUSED} 1 ", right["alone"])
    told = [f"rank {rank} raised FastPathError: {one['raised']}" for rank, one in ((1, eager), (2, compiled))]
    assert right["check"] == "; ".join([right["alone"], *told])


REFUSED, BEFORE = "of the group refused exchange", "before its launch; what rank"
REASONS = {
    "q in float64": "fast path qk_norm_rope_exchange: q_BSd is float64; it takes float32, bfloat16, float16",
    "q with gaps": "qk_exchange: q has stride 2 in its last dim; pass q.contiguous()",
    "q that is wider": "qk_exchange: q is 32 wide and its weight [16]; pass this rank's slice",
    "a partial sum in float16": "all_reduce_norm: partial is torch.float16 and x torch.float32; they must be equal",
    "more rows than the exchange holds": "all_reduce_add_rms_norm: 12 rows of 24 words; the exchange holds 3 of 24",
    "a wider partial sum, dense rows": "all_reduce_norm: partial is [3, 48], and [3, 24] is needed",
    "compiled": "all_reduce_add_rms_norm: 12 rows of 24 words; the exchange holds 3 of 24",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_one_rank_refuses_ends_the_wait_of_its_peer_which_names_it(what: str, found: Found) -> None:
    """The wait has no limit. Later calls do not wait, of this exchange or of a different one of the group."""
    waits, refuses = found["one rank refuses"][what]
    assert refuses["raised"] == REASONS[what]
    named = (
        rf"rank 1 {REFUSED} 2 {BEFORE} 0 computed since is NaN; rank 1 raised FastPathError: {re.escape(REASONS[what])}"
    )
    assert waits["raised"] == "" and all(re.fullmatch(named, check) for check in waits["checks"]), waits["checks"]
    assert all(waits["has_nan"]) and waits["looks"][1] == 2 * LOOKS_OF_A_CALL, waits
    assert all(check.startswith(f"rank 1 {REFUSED} 2") for check in refuses["checks"]), refuses


LOOKS_OF_A_CALL = 6
"""Of one that does not wait, with three rows: whether a wait has ended, and the words."""


def test_without_closing_the_peer_waits_to_the_limit(found: Found) -> None:
    """A negative control: twice, since the second exchange is not closed either."""
    waits, _ = found["one rank refuses and closes nothing"]
    assert min(waits["looks"]) >= 200, waits
    assert all(check.startswith(f"rank 1 {LATE} 2 ") for check in waits["checks"]), waits


def test_what_all_ranks_refused_alike_is_not_blamed_for_a_later_wait(found: Found) -> None:
    """Rank 1 and the others caught the error of their first call; rank 1 made no second."""
    first, absent, last = found["refused alike"]
    assert all(rank["refused"] for rank in (first, absent, last)), found["refused alike"]
    assert (first["count"], absent["count"], absent["check"]) == (2, 1, "")
    for waited in (first, last):
        assert waited["check"].startswith(f"rank 1 {LATE} 1 ") and "raised" not in waited["check"]


def test_calls_of_one_exchange_by_two_threads_are_refused(found: Found) -> None:
    """The first is in its kernel; a call after it is none of two."""
    ran, refused = found["two threads"][0]
    assert ran == "" and refused.startswith("two threads")


@pytest.mark.parametrize(
    ("fault", "late"), [("one slot", True), ("epoch not counted", False), ("words of the wrong rank", False)]
)
def test_a_broken_protocol_is_seen_under_skew(fault: str, late: bool, found: Found) -> None:
    """And the right one is not."""
    assert found["right"] == [{"off": 0, "checks": [""]}] * 2
    ranks = found[f"broken: {fault}"]
    assert sum(rank["off"] for rank in ranks) > 0, ranks
    assert any(LATE in rank["checks"][0] for rank in ranks) or not late, ranks


def test_ops_keep_what_torch_asks_of_an_op_and_compile_once_for_all_lengths(found: Found) -> None:
    assert found["ops"] == 1


def test_they_are_certified_by_ranks_that_run_at_once(found: Found) -> None:
    assert found["certified"] == {"cases": 6, "caught": 1.0}


TABLES = (torch.ones(3, 8), torch.zeros(3, 8))


def side(num_ranks: int = 2, num_rows: int = 8, row_words: int = 16) -> Exchange:
    memory = torch.zeros(num_words(num_ranks, num_rows=num_rows, row_words=row_words), dtype=torch.int64)
    addresses = [memory.data_ptr()] * num_ranks
    return Exchange.between(addresses, rank=0, num_rows=num_rows, row_words=row_words, memory=memory)


def qk(q: Tensor | None = None, k: Tensor | None = None, **limits: int) -> Any:
    q = torch.ones(1, 3, 32) if q is None else q
    k = torch.ones(1, 3, 16) if k is None else k
    weights = (torch.ones(32), torch.ones(16))
    options = {"counts": (64, 32), "eps": 1e-6, "exchange": side(**limits)}
    return qk_exchange.qk_norm_rope_exchange(q, k, *weights, *TABLES, **options)


def norm(x: Tensor | None = None, partial: Tensor | None = None, width: int = 16, **limits: int) -> Any:
    x = torch.ones(3, width) if x is None else x
    partial = torch.ones(3, width) if partial is None else partial
    options = {"eps": 1e-6, "exchange": side(**limits)}
    return all_reduce_norm.all_reduce_add_rms_norm(x, partial, torch.ones(width), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (qk, "q_BSd is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1"),
        (norm, "x_D is on the CPU; move it to a GPU, or set TRITON_INTERPRET=1"),
        (lambda: qk(torch.ones(1, 3, 32).double()), "q_BSd is float64; it takes float32, bfloat16, float16"),
        (lambda: qk(torch.ones(1, 3, 24)), "q is 24 wide, no multiple of the head size 16 of the rotary tables"),
        (lambda: qk(torch.ones(1, 3, 64)), r"q is 64 wide and its weight \[32\]; pass this rank's slice"),
        (lambda: qk(torch.ones(1, 32, 3).transpose(1, 2)), r"q has stride 3 in its last dim; pass q.contiguous\(\)"),
        (lambda: qk(k=torch.ones(2, 3, 16)), "q is a batch of 1 and k of 2; they must be equal"),
        (lambda: qk(num_rows=2), "3 rows of 2 words; the exchange holds 2 of 16"),
        (lambda: norm(torch.ones(3, 16, device="meta")), "the tensors are on meta and the exchange on cpu"),
        (lambda: norm(width=32), "3 rows of 32 words; the exchange holds 8 of 16"),
        (lambda: side(row_words=15), "an exchange of rows of 15 words; rows of 16 bytes need an even number"),
        (lambda: norm(partial=torch.ones(3, 8)), r"partial is \[3, 8\], and \[3, 16\] is needed"),
        (lambda: norm(partial=torch.ones(3, 16).half()), "partial is torch.float16 and x torch.float32"),
        (lambda: norm(width=15), "x is 15 wide; pad it to an even number"),
        (
            lambda: Exchange.of_group(None, num_rows=1, row_words=2, device=torch.device("cpu")),
            "an exchange needs GPUs that reach each other's memory, and the device is cpu",
        ),
        (lambda: side(num_ranks=17), "an exchange of 17 ranks; at most 16 write to each other"),
    ],
)
def test_bad_input_is_one_line_before_a_launch(
    call: Callable[[], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "on the CPU" not in message:
        for module in ("declare._interprets", "kernels.op.is_interpreted"):
            monkeypatch.setattr(f"tpcompile.fastpath.{module}", lambda: True)
    with pytest.raises(FastPathError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)


def ptx_of(kernel: Any, constants: dict[str, Any], dtype: str) -> str:
    return str(compiled_of(kernel, constants, dtype).asm["ptx"])


def compiled_of(kernel: Any, constants: dict[str, Any], dtype: str) -> Any:
    """As compiled for an H100 or H200, without one."""
    target = GPUTarget("cuda", 90, 32)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "state":
            signature[name] = "*i64"
        elif name == "eps":
            signature[name] = "fp32"
        else:
            signature[name] = dtype if name in POINTERS else "i32"
    indices = {(index,): constants[name] for index, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(kernel.arg_names) if name in ALIGNED}
    source = ASTSource(kernel, signature, indices, aligned)
    return triton.compile(source, target=target, options={"num_warps": 4})


POINTERS = {"q", "k", "q_weight", "k_weight", "cos", "sin", "q_out", "k_out", "partial", "x", "weight", "total", "out"}
ALIGNED = POINTERS | {"state", "num_values"}
HEADS = {"PAIRS_PER_HEAD": 64, "PAIRS": 64, "INTERLEAVED": False}
KEPT = {**HEADS, "Q_HEADS": 2, "K_HEADS": 2}
WORDS = {"NUM_RANKS": 2, "INTERPRETED": False, "BLOCK": 1024, "DTYPE": tl.bfloat16, "AS_WORDS": True}
TILED = {**HEADS, "TILE": 2, "Q_TILES": 2, "K_TILES": 1}


@pytest.mark.parametrize(
    ("kernel", "constants", "dtype"),
    [
        (qk_exchange.qk_exchange_kernel, KEPT, "*bf16"),
        (qk_exchange.qk_exchange_many_kernel, TILED, "*bf16"),
        (all_reduce_norm.all_reduce_norm_kernel, WORDS, "*i32"),
    ],
)
def test_words_are_read_and_written_by_strong_accesses_of_system_scope(
    kernel: Any, constants: dict[str, Any], dtype: str
) -> None:
    """What the argument about memory order rests on; and no multicast."""
    ptx = ptx_of(kernel, {"NUM_RANKS": 2, "INTERPRETED": False, **constants}, dtype)
    assert words_accessed(ptx) <= PLAIN | {
        "ld.volatile.global.b64",  # whether a wait has run out
        "ld.relaxed.sys.global.b64",
        "st.relaxed.sys.global.b64",
        "atom.relaxed.sys.global.cas.b64",
    }
    assert ptx.count("st.global.b64") == 1  # the count of epochs; words are written by st.relaxed.sys
    assert "st.relaxed.sys.global.b64" in ptx and "multimem" not in ptx


def test_a_refusal_is_written_before_the_words_that_end_waits_and_all_of_it_at_system_scope() -> None:
    ptx = ptx_of(closing.close_kernel, {"NUM_RANKS": 2, "BLOCK": 512}, "*i64")
    closes, words = "atom.global.acq_rel.sys.cas.b64", "atom.global.sys.release.exch.b64"
    assert words_accessed(ptx) <= {"ld.param.b64", "ld.global.b64", closes, words} and "multimem" not in ptx
    last_close, first_words = ptx.rindex(closes), ptx.index(words)
    assert last_close < first_words and "bar.sync" in ptx[last_close:first_words]


def test_words_of_a_row_lie_in_neighbouring_threads() -> None:
    """Whose stores go out together: with four words a thread, 64 rows took 19 us, and 8 us so."""
    compiled = compiled_of(all_reduce_norm.all_reduce_norm_kernel, WORDS, "*i32")
    assert set(re.findall(r"sizePerThread = \[(\d+)\]", compiled.asm["ttgir"])) == {"1"}


def test_a_flag_is_released_behind_a_barrier_and_acquired_before_values_are_read() -> None:
    ptx = ptx_of(all_reduce_norm.all_reduce_norm_kernel, {**WORDS, "AS_WORDS": False}, "*i32")
    assert words_accessed(ptx) <= PLAIN | {
        "ld.volatile.global.b64",  # whether a wait has run out
        "ld.acquire.sys.global.b64",
        "atom.global.sys.release.exch.b64",
        "atom.relaxed.sys.global.cas.b64",
    }
    assert ptx.count("st.global.b64") == 1 and "multimem" not in ptx
    before, after = ptx.split("atom.global.sys.release.exch", 1)
    # Vectors, without which whole rows are slow.
    assert 0 < before.rindex("st.global.v4.b32") < before.rindex("bar.sync")
    assert "st.global.v4.b32" not in after.partition("ld.acquire.sys")[0]
    assert "ld.global.v4.b32" in after.rpartition("ld.acquire.sys")[2]


PLAIN = {"ld.param.b64", "ld.global.b64", "st.global.b64"}


def words_accessed(ptx: str) -> set[str]:
    """Kinds of accesses of 8 bytes."""
    return set(re.findall(r"\b(?:ld|st|atom|red|multimem|fence|membar)\.[\w.:]*b64", ptx))


def test_check_names_all_ranks_that_one_wait_was_for() -> None:
    exchange = side(num_ranks=4)
    exchange.check()
    exchange.state[2] = ((2**31 + 5) << 32 | 0b1010) - 2**64  # of 64 bits with a sign
    message = rf"ranks 1, 3 {LATE} {2**31 + 5} within \d+ polls of rank 0; .* Look at ranks 1, 3 first"
    with pytest.raises(FastPathError, match=message):
        exchange.check()


def test_check_names_all_ranks_that_refused_a_call() -> None:
    exchange = side(num_ranks=4)
    exchange.state[2] = 7 << 32 | 0b1010 << closing.REFUSED_AT
    with pytest.raises(FastPathError, match=rf"^ranks 1, 3 {REFUSED} 7 "):
        exchange.check()


def test_what_peers_cannot_reach_is_left_as_it_is() -> None:
    """Made from addresses of words alone; the state of peers lies elsewhere."""
    exchange = side()
    exchange.close()
    exchange.check()
    assert not exchange.memory.any()
