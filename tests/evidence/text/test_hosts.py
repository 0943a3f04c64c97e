"""Hosts beside ranks: by name where they are few, as ranges where their names have a rule."""

from __future__ import annotations

import pytest

from tpcompile.evidence.text.hosts import hosts_text, on_hosts, ranks_by_host


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["node-b", "node-a"], "node-a,node-b"),
        ([f"node{number:03}" for number in range(1, 17)], "node[001-016]"),
        (["node1", "node2", "node10", "node4"], "node[1-2,4],node10"),
        (["ip-10-0-1-7", "ip-10-0-1-8", "ip-10-0-2-7"], "ip-10-0-1-[7-8],ip-10-0-2-7"),
        (["gpu07-ib", "gpu08-ib", "gpu07"], "gpu07,gpu[07-08]-ib"),
        (["job-worker-0", "job-worker-1", "job-master-0"], "job-master-0,job-worker-[0-1]"),
    ],
)
def test_hosts_that_differ_in_a_number_are_a_range(names: list[str], text: str) -> None:
    assert hosts_text(names) == text


def test_the_hosts_of_ranks_are_named_where_these_are_few() -> None:
    hosts = {f"node-{number}": (2 * number, 2 * number + 1) for number in range(8)}
    assert on_hosts([5], hosts) == " (node-2)"
    assert on_hosts([1, 2], hosts) == " (node-0, node-1)"
    assert on_hosts(range(16), hosts) == " (node-[0-7])"
    assert on_hosts([5], {}) == ""


def test_many_hosts_whose_names_have_no_rule_are_not_named() -> None:
    hosts = {name * 8: (rank,) for rank, name in enumerate("qwertyuiop")}
    assert on_hosts(range(10), hosts) == ""


def test_hosts_with_as_many_ranks_share_a_text() -> None:
    alike = {f"node{number:03}": tuple(range(16 * number, 16 * number + 16)) for number in range(64)}
    assert ranks_by_host(alike) == ["node[000-063] 0-1023, 16 each"]
    assert ranks_by_host({**alike, "node031": tuple(range(496, 500))}) == [
        "node[000-030] 0-495, 16 each", "node031 496-499", "node[032-063] 512-1023, 16 each",
    ]  # fmt: skip
    assert ranks_by_host({"node-a": (0,), "node-b": (1,)}) == ["node-a 0", "node-b 1"]
