from __future__ import annotations

from pathlib import Path

import pytest

from tpcompile.report.torchrun_output import Folded, TorchrunLog

REPORT = """\
W1124 12:31:44.737000 2540 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 2545 closing signal
E1124 12:31:44.804000 2540 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
tpcompile.gate FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 2544)
============================================================
""".splitlines()
OURS = [
    "Traceback (most recent call last):",
    '  File "model.py", line 3, in forward',
    "ValueError: wrong shape",
    "after",
]


def fed(lines: list[str]) -> tuple[list[str], list[str]]:
    """(shown, kept back)."""
    folded = Folded()
    shown = [line for given in lines for line in folded.feed(given)]
    return [*shown, *folded.rest()], folded.hidden


def test_torchruns_report_is_kept_back() -> None:
    assert fed(["before", *REPORT, "after"]) == (["before", "after"], REPORT)


WARNINGS = [
    "[rank1]:W1128 17:50:17.241000 282 torch/_dynamo/variables/tensor.py:1759] [0/0] Graph break from `Tensor.item()`",
    '[rank1]:W1128 17:50:17.241000 282 torch/_dynamo/variables/tensor.py:1759] [0/0]   File "model.py", line 33',
    "W1128 17:50:18.190000 283 torch/utils/cpp_extension.py:178] No CUDA runtime is found",
]
SHOWN = [
    "[rank1]:E1128 17:50:17.241000 282 torch/_dynamo/x.py:1] an error",
    "[rank1]:W1128 1 2 my/torch/file.py:1] mine",
]


def test_warnings_of_torch_are_kept_back_and_its_errors_and_those_of_the_program_are_not() -> None:
    assert fed([*WARNINGS, *SHOWN]) == (SHOWN, WARNINGS)


def test_who_asks_for_torchs_logs_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "graph_breaks")
    shown: list[str] = []
    with TorchrunLog(tmp_path / "torchrun.log", shown.append) as log:
        for line in [*WARNINGS, *REPORT]:
            log.line(line)
    assert (shown, log.num_hidden) == (WARNINGS, len(REPORT))


def test_a_traceback_of_a_rank_is_shown() -> None:
    assert fed(OURS) == (OURS, [])
    assert fed([*OURS, *REPORT]) == (OURS, REPORT)


def test_a_traceback_right_before_that_of_torchrun_is_shown() -> None:
    assert fed([*OURS[:3], *REPORT[2:]]) == (OURS[:3], REPORT[2:])


def test_a_traceback_that_is_cut_off_is_shown_at_the_end() -> None:
    assert fed(OURS[:2]) == (OURS[:2], [])


def test_lines_of_equal_signs_of_a_program_are_shown() -> None:
    assert fed(["====", "my table", "===="]) == (["====", "my table", "===="], [])


def test_the_file_keeps_all_of_it(tmp_path: Path) -> None:
    shown: list[str] = []
    with TorchrunLog(tmp_path / "torchrun.log", shown.append) as log:
        for line in ["before", *REPORT]:
            log.line(line)
    assert shown == ["before"] and log.num_hidden == len(REPORT)
    assert log.path.read_text().splitlines() == ["before", *REPORT]
    log.show_hidden()
    assert shown[1:] == REPORT


def test_a_file_that_cannot_be_written_costs_no_line(tmp_path: Path) -> None:
    shown: list[str] = []
    with TorchrunLog(tmp_path / "none" / "torchrun.log", shown.append) as log:
        log.line("seen")
    assert shown == ["seen"]
