"""A fused kernel is refused by who registered it: ops under torch's names, replaced kernels, passes, backends."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fastpath import banned, evading
from tests.gate.runs import run_many
from tpcompile.evidence.records import Check, CheckId, Verdict
from tpcompile.testing import run_on_ranks

HERE = r"evading\.py:\d+"
NAMED = {
    "aten fragment": ("aten::local_norm", HERE, "it is not registered as a fast path"),
    "inductor fragment": ("inductor::local_norm", HERE, "it is not registered as a fast path"),
    "overload": ("aten::rsqrt", HERE, "it is not registered as a fast path"),
    "custom op": ("quantized::fused_norm", f"{HERE} in fused_norm", "it is not registered as a fast path"),
    "overridden": ("aten::silu", HERE, "its kernel for CPU is not torch's"),
    "post-grad pass": ("tests.fastpath.evading.fuses_norms", f"{HERE} in fuses_norms", "post_grad_custom_post_pass"),
    "joint pass": ("tests.fastpath.evading.FusesNorms", f"{HERE} in FusesNorms", "joint_custom_pre_pass"),
    "fusion pass": ("tests.fastpath.evading.fuses_norms", HERE, "_post_fusion_custom_pass"),
    "passes in a list": ("tests.fastpath.evading.fuses_norms", HERE, "reorder_for_compute_comm_overlap_passes"),
    "own backend": ("tests.fastpath.evading.swaps_nodes", f"{HERE} in swaps_nodes", "the backend of torch.compile"),
    "own compiler": ("tests.fastpath.evading.compiles_forward", HERE, "the backend of torch.compile"),
    "allow_in_graph": ("tests.fastpath.evading.untraced", f"{HERE} in untraced", "nothing traced it"),
    "nonstrict_trace": ("tests.fastpath.evading.traced_leniently", HERE, "nothing traced it"),
}
"""Program -> what is refused, where it is defined or registered, and what else the report says of it."""
CALLED = {"aten fragment", "inductor fragment", "overload", "custom op", "allow_in_graph", "nonstrict_trace"}
"""Those that the graph calls: the line to blame is the call."""


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    return banned.parsed(run_on_ranks(evading.verdicts, world_size=2, timeout_s=200))


def refusal(verdict: Verdict) -> Check:
    (check,) = (check for check in verdict.checks if check.id == CheckId.TP_AWARE)
    return check


def test_every_program_is_expected_to_be_named() -> None:
    assert NAMED.keys() == evading.EVADING.keys()


@pytest.mark.parametrize("program", NAMED)
def test_it_is_refused_by_name_with_the_file_that_made_it(verdicts: dict[str, list[Verdict]], program: str) -> None:
    name, defined, says = NAMED[program]
    for verdict in verdicts[program]:
        check = refusal(verdict)
        assert (verdict.exit_code, check.is_red, check.observed) == (1, True, name)
        details = "\n".join(check.details)
        assert re.search(f"{re.escape(name)} is defined at [^,]*{defined}", details) and says in details, details
        assert check.line is not None
        if program in CALLED:
            assert "# the user's line" in check.line.code


@pytest.mark.parametrize("program", evading.HEALTHY)
def test_what_torch_itself_registers_is_green(verdicts: dict[str, list[Verdict]], program: str) -> None:
    assert [(one.exit_code, refusal(one).observed) for one in verdicts[program]] == [(0, "none refused")] * 2


@pytest.mark.parametrize("program", evading.DECLARED)
def test_what_is_declared_is_green_and_printed(verdicts: dict[str, list[Verdict]], program: str) -> None:
    name, defined, _ = NAMED[program]
    for verdict in verdicts[f"{program} declared"]:
        check = refusal(verdict)
        assert (verdict.exit_code, check.observed) == (0, f"declared: {name}")
        (told,) = check.details
        assert re.match(rf"{re.escape(name)}: declared: .*, defined at [^,]*{defined}", told)


@pytest.mark.ranks
def test_the_gate_refuses_them(tmp_path: Path) -> None:
    hows = ("aten fragment", "post-grad pass", "overridden")  # the last stays for the rest of the process
    jobs = {
        how: {"target": "tests.fastpath.evading:build", "overrides": [f"how={how}"], "device": "cpu"} for how in hows
    }
    for how, run in run_many(tmp_path, jobs).items():
        (check,) = (check for check in run.judged.checks if check.id == CheckId.TP_AWARE)
        name, defined, _ = NAMED[how]
        assert run.exit_code == 1 and name in check.observed
        assert re.search(defined, "\n".join(check.details))
