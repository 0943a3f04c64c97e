"""`check` on real ranks: a fused kernel that may not run on a shard is named, with its line and the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.fastpath import banned
from tpcompile.evidence.groups.by_group import Items
from tpcompile.evidence.layers.differing_items import rows_of
from tpcompile.evidence.layers.kernels import SPEC
from tpcompile.evidence.layers.spec import Difference
from tpcompile.evidence.records import Check, CheckId, CompileRecord, Kernel, Verdict, value_item
from tpcompile.evidence.records.causes import Cause
from tpcompile.fastpath import ban
from tpcompile.fastpath.use import Use
from tpcompile.testing import run_on_ranks

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
        assert re.search(f"{name} .*defined at .*{defined}", details), details


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


def test_ranks_with_different_versions_differ_by_name_in_the_kernels_layer_too() -> None:
    """And ranks with one version do not, whatever the order in which they call it."""
    hashes = {"vendored.mine": "5678", "vendored.theirs": "1234"}
    mine, reordered = code_of(hashes), code_of(dict(reversed(hashes.items())))
    assert mine == reordered == ["source of vendored.mine :: 5678", "source of vendored.theirs :: 1234", "buf0 :: pass"]
    assert code_of(hashes | {"vendored.theirs": "4321"})[1] == "source of vendored.theirs :: 4321"


def test_a_compile_whose_generated_code_was_not_seen_has_no_kernels_layer() -> None:
    assert not ban.with_sources(CompileRecord(compile_id="0/0"), uses_of(["vendored.mine"]), {}).kernels


def uses_of(names: Iterable[str]) -> list[Use]:
    return [Use(value_item(name, "in the dynamo graph")) for name in names]


def code_of(hashes: dict[str, str]) -> list[str]:
    """Items of the layer, of a compile that calls these kernels."""
    generated = Kernel(phase="forward", name="buf0", kind="extern", code="pass")
    compile_ = CompileRecord(compile_id="0/0", kernels=(generated,))
    sourced = ban.with_sources(compile_, uses_of(hashes), hashes)
    return [item.text for item in SPEC.items(sourced, "forward")]


def test_a_different_source_is_what_differs_of_generated_code() -> None:
    """Not the line of code that follows from it."""
    mine = [value_item("source of norm", "1234"), value_item("line", "x * 2")]
    theirs = [value_item("source of norm", "4321"), value_item("line", "x * 3")]
    items = Items([mine, theirs])
    rows = rows_of(items, is_ordered=True)
    found = SPEC.explain(Difference(((0,), (1,)), items, rows, compile=None))  # type: ignore[arg-type]
    assert (found.cause, found.row.first.about) == (Cause.ENVIRONMENT, "source of norm")
