"""recording/flow: what the recorded lines give their variables, without a look at what the user's code would do."""

from __future__ import annotations

import secrets
from collections import deque
from enum import Enum
from typing import Any, ClassVar

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.recording.test_flow import chosen, recorded
from tpcompile.evidence.timeline.flow import (
    EXACT,
    LENGTH,
    LINE_BITS,
    LINE_MASK,
    NEAR,
    OWN,
    RETURNED,
    SEED,
    VALUE_BITS,
    Flow,
    Kind,
    Named,
    hashed_as,
    near_bits,
    shortened,
    value_text,
)
from tpcompile.recording import flow as module
from tpcompile.recording.flow import IS_POSSIBLE, FlowRecorder


def values(flow: Flow, function: str) -> list[tuple[str, int | bytes]]:
    """(name, small int or the bits of a hash) of what a function assigned and returned, in order."""
    (number,) = (number for number, code in enumerate(flow.codes) if code.function.endswith(function))
    found: list[tuple[str, int | bytes]] = []
    for code, packed in flow.steps():
        if code == number and packed >> LINE_BITS == Kind.VALUE:
            index, value = (packed & LINE_MASK) >> VALUE_BITS, packed & (1 << VALUE_BITS) - 1
            if index == LENGTH:
                continue
            if index in (NEAR, OWN):
                found.append(("near" if index == NEAR else "own", value.to_bytes(3, "little")))
                continue
            name = "returned" if index == RETURNED else flow.codes[code].names[index]
            found.append((name, value & EXACT - 1 if value & EXACT else value.to_bytes(3, "little")))
    return found


def class_bits(name: str) -> bytes:
    """The bits of an object of a class."""
    return (shortened(hashed_as(SEED, Named.INSTANCE, name)) or 0).to_bytes(3, "little")


class Holder:
    asked: ClassVar[list[object]] = []
    size = property(asked.append, lambda *_: None)


def assigning(width: int, holder: Any) -> Any:
    size = width * 2
    for index in range(2):
        size += index
    holder.scale = size
    holder.size = 3
    shape, flags = torch.ones(2, size), (True, None, "a", 0.5, -1, {"a": 1})
    return shape, flags


def lengths(flow: Flow, function: str) -> list[int]:
    """Of the lists and tuples that a function assigned and returned, in order."""
    (number,) = (number for number, code in enumerate(flow.codes) if code.function.endswith(function))
    values = [
        packed & LINE_MASK for code, packed in flow.steps() if (code, packed >> LINE_BITS) == (number, Kind.VALUE)
    ]
    return [value & (1 << VALUE_BITS) - 1 for value in values if value >> VALUE_BITS == LENGTH]


def collecting(rows: Any) -> Any:
    kept = [row for row in rows if row]
    pair = kept[:1], tuple(kept)
    text = "no list"
    return {len(text): pair}


@pytest.mark.usefixtures("callbacks")
def test_the_length_of_a_list_is_a_value_of_its_own(name: str) -> None:
    """Its hash is of what is in it as well, which each rank has of its own."""
    flow = recorded(lambda _: collecting([[1], [], [2, 3], [4]]), name)
    assert lengths(flow, "collecting") == [4, 3, 2]


class Mode(Enum):
    FAST = 1
    SLOW = 2


NOTED: list[int] = []


class Pool:
    def __init__(self) -> None:
        self.waiting: deque[int] = deque()

    def take(self, rows: list[int], flags: list[bool], at: int) -> None:
        rows.append(at)
        flags[at - 1] = True
        self.waiting.append(at)
        NOTED.append(at)
        dict(a=1).update(b=2)


@pytest.mark.usefixtures("callbacks")
def test_a_container_that_a_line_changes_gets_a_value_there(name: str) -> None:
    """By a method or an index; one of the module too, and the attribute of a variable."""
    NOTED.clear()

    def taking(_: Any) -> None:
        Pool().take([1, 2], [False, False], 2)

    flow = recorded(taking, name)
    found = values(flow, "take")
    assert [name for name, _ in found] == ["rows", "flags", "at", "rows", "flags", "self.waiting", "global NOTED"]
    assert lengths(flow, "take") == [2, 2, 3, 2, 1]
    assert found[0][1] != found[3][1], "the value is that after the line"
    assert found[1][1] != found[4][1]


@pytest.mark.usefixtures("callbacks")
def test_the_last_items_of_a_long_list_are_read(name: str) -> None:
    def one(*items: int) -> int | bytes:
        ((_, value),) = values(recorded(lambda _: varied(list(items)), f"{name}{secrets.token_hex(4)}"), "varied")
        return value

    rows = range(20)
    assert one(*rows) != one(*rows[:-1], 7), "what was appended"
    assert one(*rows) != one(7, *rows[1:])
    assert one(*rows) == one(*rows[:8], 7, *rows[9:]), "in the middle nothing is"


@pytest.mark.usefixtures("callbacks")
def test_values_that_lines_set_are_steps_too(name: str) -> None:
    """An object whose class computes an attribute is not asked for it; its value is the name of its class."""
    found = values(recorded(lambda _: assigning(2, Holder()), name), "assigning")
    assert [value for value in found if value[0] == "holder"] == [("holder", class_bits("Holder"))]
    found = [value for value in found if value[0] != "holder"]
    assert found[:7] == [
        ("width", 2), ("size", 4), ("index", 0), ("size", 4), ("index", 1), ("size", 5), ("holder.scale", 5),
    ]  # fmt: skip
    assert sorted(name for name, _ in found[7:]) == ["flags", "returned", "shape"]
    assert Holder.asked == []
    assert all(isinstance(value, bytes) for _, value in found[7:])


@pytest.mark.skipif(not IS_POSSIBLE, reason="before Python 3.12")
def test_values_have_the_same_hash_in_c_and_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")

    def one(number: int) -> list[tuple[str, int | bytes]]:
        return values(
            recorded(lambda _: [varied(value) for value in VARIED], f"{secrets.token_hex(8)}{number}"), "varied"
        )

    in_c = one(0)
    monkeypatch.setattr(module, "compiled", lambda: None)
    assert one(1) == in_c
    hashes = [value for value in in_c if value[0] not in ("near", "own")]
    assert len(set(hashes)) == len(VARIED), "what differs has another hash"
    assert len([value for value in in_c if value[0] == "own"]) == len(WITH_OWN)


@pytest.mark.usefixtures("callbacks")
def test_a_text_is_there_without_the_number_of_the_rank_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(rank: int, *texts: Any) -> list[int | bytes]:
        monkeypatch.setenv("RANK", str(rank))
        found = values(recorded(lambda _: [varied(text) for text in texts], f"{name}{rank}"), "varied")
        return [value for kind, value in found if kind == "own"]

    mine = own(3, "rank_3.log", ("cuda:3", 1), torch.device("cuda", 3), "v13", "v3")
    theirs = own(10, "rank_10.log", ("cuda:10", 1), torch.device("cuda", 10), "v13", "v3")
    assert (mine[:3], len(mine), len(theirs)) == (theirs, 4, 3), "a number is whole, and of dtypes none counts"


WITH_OWN = (
    "rank_3.log", "logs/3/x_003", ("a", ("cuda:3",)), "3", torch.device("cuda", 3), "é" * 60 + " 3 3 3 3 3",
    "3" + "z" * 70,
    "y" * 70 + "3",
)  # fmt: skip
VARIED = (
    *WITH_OWN, "13", "333", "3" * 30, torch.float32, ("9" * 40, "w"),
    deque([1, 2, 3]), tuple(range(9)), Named.CLASS, Named.MEMBER, Mode.FAST, Mode.SLOW, Mode, Pool, Pool(),
    assigning, lengths, Pool.take,
    None, True, False, 0, 7, -7, 1 << 20, 1 << 40, -(1 << 62), 0.5, -0.5, float("inf"), "", "a", "b" * 70, "é",
    (), (1,), [1, 2], (1, (2, 3)), (1, (2, 4)), {}, {"a": 1}, torch.ones(2), torch.ones(3), torch.ones(2).half(),
    torch.ones(2, 3), torch.ones(3, 2).t(),
    torch.ones(2, requires_grad=True), torch.bfloat16, torch.float16, torch.device("cpu"),
)  # fmt: skip


FLOATS = (0.5, 0.05, -0.0, float("nan"), -0.03125, 1e300, -1e300, 1e-300, float("inf"), float("-inf"), 1.0 / 3)


@pytest.mark.usefixtures("callbacks")
def test_a_float_is_there_rounded_too(name: str) -> None:
    found = values(recorded(lambda _: [varied(value) for value in FLOATS], name), "varied")
    nears = [int.from_bytes(value, "little") for kind, value in found if kind == "near" and isinstance(value, bytes)]
    assert nears == [near_bits(value) for value in FLOATS]
    assert [value_text(0, near=near) for near in (nears[0], nears[-1], near_bits(0.05))] == ["0.5", "0.333", "0.05"]


class Counter:
    def __init__(self) -> None:
        self.num_bad = 0

    def count(self, other: Counter) -> None:
        self.num_bad += 1
        other.num_bad -= self.num_bad


@pytest.mark.usefixtures("callbacks")
def test_what_is_added_to_an_attribute_is_a_value_of_it(name: str) -> None:
    def counting(_: Any) -> None:
        Counter().count(Counter())

    found = values(recorded(counting, name), "count")
    assert [value for value in found if value[0] != "other"][:1] == [("self.num_bad", 1)]
    assert [kind for kind, _ in found if kind != "other"] == ["self.num_bad", "other.num_bad"]


class Odd:
    """Code of the user's that must not run for a value."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class OddText(str):
    """Whose class a look at it would ask for."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class OddList(list[int]):
    def __len__(self) -> int:
        raise RuntimeError


def odd_values() -> None:
    values = Odd(), OddList([1]), OddText("a"), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "\ud800"
    for value in values:
        varied(value)
    holder = values[0]

    class Held:
        held = 3

    del holder, Held


@pytest.mark.usefixtures("callbacks")
def test_no_code_of_the_users_runs_for_a_value_and_none_of_a_class_is_one(name: str) -> None:
    flow = recorded(lambda _: odd_values(), name)
    assert [value for value, _ in values(flow, "varied")] == ["value"] * 4  # of the first, its class
    assert all(code.names == () for code in flow.codes if code.function.endswith(".Held"))


def varied(value: Any) -> None:
    del value


class Counting(TorchFunctionMode):
    """Sees each access to an attribute of a tensor."""

    num_seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("callbacks")
def test_a_mode_of_the_users_does_not_see_that_a_tensor_is_looked_at(name: str) -> None:
    tensor, mode = torch.ones(2), Counting()

    def program(_: FlowRecorder) -> None:
        with mode:
            varied(tensor)
        varied(tensor)

    found = values(recorded(program, name), "varied")
    assert (mode.num_seen, len(found)) == (0, 1), "outside of the mode it is a value"


@pytest.mark.usefixtures("callbacks")
def test_what_a_value_holds_counts_as_events_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BUDGET", 4000)
    monkeypatch.setattr(module, "_BUDGET_IN_PYTHON", 4000)
    monkeypatch.setattr(module, "_OFTEN", 10)

    def is_left_out(value: Any, num_calls: int) -> bool:
        flow = recorded(lambda _: [varied(value) for _ in range(num_calls)], secrets.token_hex(8))
        (code,) = (number for number, found in enumerate(flow.codes) if found.function == "varied")
        return any(number == code and packed >> LINE_BITS == Kind.MARK for number, packed in flow.steps())

    for value, num_calls in (([1] * 8, 400), (torch.ones(2), 720)):  # 12 and 7 each; a number counts 4
        assert not is_left_out(1, num_calls)
        # Counts begin anew with each second, which may be in the middle; sys.settrace has no limit.
        assert any(is_left_out(value, num_calls) for _ in range(4)) or not IS_POSSIBLE


def test_code_whose_names_cannot_be_told_runs_and_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(_code: object) -> None:
        raise ValueError("an odd code")

    monkeypatch.setattr(module, "assigned", odd)
    flow = recorded(lambda _: chosen(True), name)
    assert [code.names for code in flow.codes if code.function == "chosen"] == [()]


@pytest.mark.skipif(not IS_POSSIBLE, reason="Python 3.12 has sys.monitoring")
def test_code_that_was_followed_is_not_called_back_for_later(name: str) -> None:
    recorded(lambda _: chosen(True), name)
    monitoring = module._MONITORING
    monitoring.use_tool_id(module._TOOL, "a later recording")
    try:
        assert monitoring.get_local_events(module._TOOL, chosen.__code__) == 0
    finally:
        monitoring.free_tool_id(module._TOOL)
