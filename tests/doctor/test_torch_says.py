"""torch in a child process: what it answers, and what is said of one that hangs, crashes or is not there."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tpcompile.doctor import torch_says
from tpcompile.doctor.finding import Finding, Level
from tpcompile.doctor.torch_says import Answer, ask

ANSWER = {"torch": "2.13.0", "untested": "", "cuda": "13.0", "triton": "3.6.0", "gpus": ["H200", "H200"],
          "nccl": "2.28.9", "backends": ["gloo", "nccl"], "no_peer_access": []}  # fmt: skip


def child(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def found(tools: dict[str, str], environ: dict[str, str] | None = None, **changes: Any) -> dict[str, Finding]:
    """The findings by name, where `nvidia-smi` prints `tools` for its first option."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_says, "_output", lambda _, option, *__: tools.get(option.partition("=")[0], ""))
        answer = Answer.model_validate({**ANSWER, **changes})
        return {one.name: one for one in torch_says.findings(answer, environ or {})}


SMI = {"--query-gpu": "580.65.06\n580.65.06", "topo": "GPU0 X NV18\nGPU1 NV18 X"}


def test_a_child_that_hangs_is_a_finding_within_the_limit() -> None:
    said = ask(child("import time; time.sleep(60)"), timeout_s=0.5)
    assert isinstance(said, Finding) and said.level == Level.FAIL and "0.5 s" in said.says


@pytest.mark.parametrize(
    ("code", "says"),
    [("raise ImportError('libcudart.so')", "libcudart.so"), ("import os; os.abort()", "signal 6"), ("print(1)", "1")],
)
def test_a_child_that_does_not_answer_is_a_finding_with_its_last_words(code: str, says: str) -> None:
    said = ask(child(code), timeout_s=60)
    assert isinstance(said, Finding) and said.level == Level.FAIL and says in said.says


def test_an_answer_below_warnings_is_read() -> None:
    said = ask(child(f"print('a warning'); print({json.dumps(ANSWER)!r})"), timeout_s=60)
    assert isinstance(said, Answer) and said.nccl == "2.28.9"


def test_two_gpus_that_reach_each_other_are_fine() -> None:
    lines = found(SMI)
    assert {one.level for one in lines.values()} == {Level.OK}
    assert "NV18" in lines["peer access"].says and "2 x H200" in lines["GPUs"].says


@pytest.mark.parametrize(
    ("name", "level", "changes"),
    [
        ("peer access", Level.WARN, {"no_peer_access": [(0, 1), (1, 0)]}),
        ("torch", Level.WARN, {"untested": "torch 2.15: tpcompile was tested with torch 2.11 to 2.13"}),
        ("triton", Level.FAIL, {"triton": "none"}),
        ("backends", Level.FAIL, {"backends": ["gloo"]}),
        ("GPUs", Level.WARN, {"gpus": [], "cuda": ""}),
    ],
)
def test_what_is_wrong_is_the_one_line_that_is_not_ok(name: str, level: Level, changes: dict[str, Any]) -> None:
    bad = {one.name: one for one in found(SMI, **changes).values() if one.level != Level.OK}
    assert {line: one.level for line, one in bad.items()} == {name: level}
    assert bad[name].todo


def test_gpus_that_are_hidden_are_told_from_a_build_without_cuda() -> None:
    hidden = found(SMI, {"CUDA_VISIBLE_DEVICES": "-1"}, gpus=[])["GPUs"]
    assert "CUDA_VISIBLE_DEVICES" in hidden.says


def test_a_machine_without_gpus_is_fine() -> None:
    lines = found({}, gpus=[], cuda="", triton="none", backends=["gloo"], nccl="")
    assert {one.level for one in lines.values()} == {Level.OK}
