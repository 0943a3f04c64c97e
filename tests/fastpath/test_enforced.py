"""`check` on real ranks: a fused kernel that may not run on a shard is named, with its line and the user's."""

from __future__ import annotations

import re

import pytest

from tests.fastpath import banned
from tests.rank_jobs import run_on_ranks
from tpcompile.evidence.records import Check, CheckId, Verdict

pytest.importorskip("triton")
NORM = "tests.fastpath.kernels.norm_kernel"
USERS = "# the user's line"


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Verdict]]:
    folder = str(tmp_path_factory.mktemp("installed"))
    return banned.parsed(run_on_ranks(banned.verdicts, folder, world_size=2, timeout_s=200))


def refusal(verdict: Verdict) -> Check:
    (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
    return check


@pytest.mark.parametrize(
    ("program", "name", "defined", "why"),
    [
        ("single_gpu", NORM, r"fastpath/kernels.py:\d+ in norm_kernel", "fast path norm is declared tp=none"),
        ("unregistered", NORM, r"fastpath/kernels.py:\d+ in norm_kernel", "it is not registered as a fast path"),
        ("hidden", "tpcompile_tests::conceals", r"banned.py:\d+ in conceals", "it is not registered as a fast path"),
        ("backward_only", NORM, r"fastpath/kernels.py:\d+ in norm_kernel", "it is not registered as a fast path"),
        ("third_party", "vendored.vendored_kernel", r"site-packages/vendored.py:\d+ in vendored_kernel", "it is not"),
        ("shared", NORM, r"fastpath/kernels.py:\d+ in norm_kernel", "fast path wrong is declared tp=none"),
    ],
)
def test_a_banned_kernel_is_named_with_its_line_and_the_users(
    verdicts: dict[str, list[Verdict]], program: str, name: str, defined: str, why: str
) -> None:
    for verdict in verdicts[program]:
        check = refusal(verdict)
        assert (verdict.exit_code, check.is_red, check.observed) == (1, True, name)
        assert check.line is not None and check.line.file == banned.__file__
        assert (USERS if program != "backward_only" else "# only here") in check.line.code
        details = "\n".join(check.details)
        assert f"called at {check.line}" in details and why in details
        assert re.search(f"{name} is defined at .*{defined}", details), details


def test_ranks_with_different_grids_are_named_with_both_numbers_the_kernel_and_the_line(
    verdicts: dict[str, list[Verdict]],
) -> None:
    for verdict in verdicts["grids"]:
        (found,) = (found for found in verdict.divergences if found.is_red)
        assert found.title == f"{NORM}: grid=[(24, 1, 1)] / grid=[(28, 1, 1)]"
        assert [group.ranks for group in found.groups] == [(0,), (1,)]
        assert found.groups[0].item and "norm_kernel[grid]" in found.groups[0].item.line.code


def test_ranks_with_different_versions_of_a_kernel_are_named(verdicts: dict[str, list[Verdict]]) -> None:
    for verdict in verdicts["third_party"]:
        (found,) = (found for found in verdict.divergences if found.is_red)
        assert found.title.startswith("source of vendored.vendored_kernel: ")
        assert [group.ranks for group in found.groups] == [(0,), (1,)]
