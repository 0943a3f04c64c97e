"""Each sentence of advice on ranks that differ has a program: red as it is, green where the sentence is followed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.advice.played import declared
from tests.forked import run_python
from tpcompile.evidence.judgement.rank_taint import SUGGESTIONS
from tpcompile.evidence.records.causes import ADVICE, Cause

pytestmark = [pytest.mark.slow, pytest.mark.ranks]
ON_RANKS = {Cause.INPUT_VALUES, Cause.WEIGHTS, Cause.PARTED}
"""What only a preflight or a sentinel finds: tests/preflight/test_handshake.py, tests/sentinel/test_executed.py."""


@pytest.fixture(scope="module")
def played() -> Any:
    """What became of each program; all of them in one process."""
    ended = run_python(["-m", "tests.advice.played"])
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


@pytest.mark.parametrize("name", [program.body.__name__ for program in declared()])
def test_the_advice_turns_red_into_green(name: str, played: Any) -> None:
    row = played[name]
    as_it_is, followed = row["verdicts"]
    assert as_it_is["exit_code"] != 0
    assert row["key"] in (as_it_is["cause"], *as_it_is["taints"]), as_it_is["says"]
    assert (followed["exit_code"], followed["taints"]) == (0, []), followed["says"]


def test_every_sentence_has_a_program() -> None:
    shown = {(program.key, program.sentence) for program in declared()}
    of_causes = {(cause, text) for cause, texts in ADVICE.items() for text in texts if cause not in ON_RANKS}
    assert of_causes - shown == set()
    assert set(SUGGESTIONS.values()) == {program.sentence for program in declared() if program.key in SUGGESTIONS}


def test_a_sentence_without_a_program_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADVICE, Cause.KILLED, ("Look for the out-of-memory killer.",))
    with pytest.raises(AssertionError, match="out-of-memory"):
        test_every_sentence_has_a_program()
