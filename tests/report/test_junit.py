from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from tests.report import samples
from tpcompile.evidence.records import RankGroup, Status, Verdict, value_item
from tpcompile.report import junit


def suite(verdict: Verdict) -> ET.Element:
    """The one test suite of the report."""
    found = ET.fromstring(junit.render(verdict)).find("testsuite")
    assert found is not None
    return found


@pytest.mark.parametrize("verdict", [samples.failing(), samples.passing()], ids=["failing", "passing"])
def test_the_counts_of_the_suite_are_those_of_its_cases(verdict: Verdict) -> None:
    found = suite(verdict)
    cases = found.findall("testcase")
    assert int(found.attrib["tests"]) == len(cases) == len(verdict.checks)
    assert int(found.attrib["failures"]) == sum(c.find("failure") is not None for c in cases)
    assert int(found.attrib["skipped"]) == sum(c.find("skipped") is not None for c in cases)


def test_a_failure_carries_expected_observed_ranks_line_and_details() -> None:
    failure = suite(samples.failing()).find("testcase/failure")
    assert failure is not None and failure.text is not None
    check = samples.failing().checks[1]
    assert all(text in failure.attrib["message"] for text in (check.expected, check.observed))
    for part in ("rank 7", "/repo/models/block.py:12", samples.LONG_CODE, "f32[8, 16] stays"):
        assert part in failure.text


def test_red_divergences_are_in_the_output_and_accepted_ones_are_not() -> None:
    output = suite(samples.failing()).findtext("system-out") or ""
    assert "rank 7: %4 :: mul(%3, 8)" in output
    assert "vocabulary" not in output


def test_a_red_verdict_without_a_failed_check_is_red_in_junit_too() -> None:
    verdict = samples.passing().model_copy(update={"exit_code": 5, "summary": "nothing was compiled"})
    found = suite(verdict)
    assert found.attrib["failures"] == "1"
    assert verdict.summary in (found.findtext("testcase/failure") or "")


def test_a_verdict_without_checks_has_one_case() -> None:
    found = suite(Verdict(status=Status.PASS, exit_code=0, world_size=1, summary="ok"))
    assert (found.attrib["tests"], found.attrib["failures"]) == ("1", "0")


def test_control_characters_surrogates_and_markup_stay_valid_xml() -> None:
    nasty = "\x00\x08\x1b]\ufffe\ud800 <&>\"' ]]> \r\n end"
    check = samples.check(name=nasty, status=Status.FAIL, expected=nasty, observed=nasty, details=(nasty,))
    groups = (RankGroup(ranks=(0,), item=value_item("item", nasty)),)
    divergence = samples.divergence(title=nasty, groups=groups)
    text = junit.render(
        samples.failing().model_copy(update={"checks": (check,), "divergences": (divergence,), "summary": nasty})
    )
    assert text.isascii()
    assert "\\x00\\x08\\x1b]" in (ET.fromstring(text).findtext("testsuite/testcase/failure") or "")
