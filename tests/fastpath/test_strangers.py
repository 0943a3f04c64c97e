"""Fused kernels in the forms in which they are published: `check` on ranks names each, with the program's line."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fastpath import banned
from tpcompile.errors import FastPathError
from tpcompile.evidence.records import CheckId, Verdict
from tpcompile.fastpath import ban_in_eager
from tpcompile.testing import run_on_ranks

pytest.importorskip("triton")
from tests.fastpath import strangers  # declares kernels

HERE = "tests.fastpath.strangers"
ROWS, GRADIENT = f"{HERE}.rows_kernel", f"{HERE}.gradient_kernel"
USERS, HELPERS, WRAPPERS = "# the user's line", "# the helper's line", "# the wrapper's line"
"""The innermost line of the program: its own helpers are part of it, an installed package is not."""
NAMED = {
    "liger_like": (f"{GRADIENT}, {ROWS}", HELPERS),
    "op_that_hides_a_launch": ("strangers::fused_norm", USERS),
    "op_of_triton_kernels": ("strangers::seen_through", USERS),
    "only_in_the_backward": (GRADIENT, HELPERS),
    "op_with_a_kernel_in_its_gradient": ("strangers::with_gradient", USERS),
    "third_party_module": ("stranger_norms.inner_kernel", USERS),
    "op_in_cpp": ("_strangers_C::rms_norm", USERS),
    "op_in_cpp_that_writes_its_input": ("_strangers_C::rms_norm_", USERS),
    "partial_of_a_launch": (ROWS, USERS),
    "partial_of_a_launcher": (ROWS, HELPERS),
    "method_of_a_module": (ROWS, WRAPPERS),
    "autotuned": (ROWS, USERS),
    "heuristics": (ROWS, USERS),
}
"""Program -> what is refused, and the comment on the line."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Verdict]]:
    folder = str(tmp_path_factory.mktemp("installed"))
    return banned.parsed(run_on_ranks(strangers.verdicts, folder, world_size=2, timeout_s=200))


def test_every_program_is_expected_to_be_named() -> None:
    assert NAMED.keys() == strangers.PROGRAMS.keys()


@pytest.mark.parametrize("program", NAMED)
def test_a_kernel_is_named_with_the_line_of_the_program(verdicts: dict[str, list[Verdict]], program: str) -> None:
    name, code = NAMED[program]
    for verdict in verdicts[program]:
        (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
        assert (verdict.exit_code, check.is_red, check.observed) == (1, True, name)
        assert check.line is not None and check.line.file == strangers.__file__
        assert code in check.line.code


def test_a_program_without_such_a_kernel_is_green(verdicts: dict[str, list[Verdict]]) -> None:
    assert [verdict.exit_code for verdict in verdicts["healthy"]] == [0, 0]


@pytest.mark.parametrize(
    "program",
    sorted(NAMED.keys() - {"autotuned", "third_party_module", "only_in_the_backward", "op_of_triton_kernels"}),
)
def test_in_eager_the_same_are_refused_before_they_run(program: str) -> None:
    """An autotuned kernel asks for a GPU before it launches."""
    first = NAMED[program][0].split(", ")[-1]
    call: Any = strangers.PROGRAMS[program]()
    with ban_in_eager(2), pytest.raises(FastPathError, match=f"{first} was (called|launched) at .*strangers.py"):
        call(torch.ones(4))
