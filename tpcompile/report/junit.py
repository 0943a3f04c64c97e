"""Verdict -> JUnit XML, one testcase per check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from tpcompile.evidence.judgement.leading import blamed_text
from tpcompile.evidence.records import Check, Divergence, Status, Verdict
from tpcompile.evidence.text.hosts import on_hosts
from tpcompile.evidence.text.ranks import named_ranks
from tpcompile.report.wording import (
    cause_lines,
    failed,
    item_text,
    mode_title,
    more_alike,
    outcome,
    plain,
    red_by_kind,
    source_lines,
)


def render(verdict: Verdict) -> str:
    """JUnit XML text; a verdict that failed outside its checks has a testcase of its own, so red is never green."""
    checks = _testcases(verdict)
    numbers = Counter(check.status for check in checks)
    attributes = {
        "name": "tpcompile",
        "tests": str(len(checks)),
        "failures": str(numbers[Status.FAIL]),
        "errors": "0",
        "skipped": str(numbers[Status.SKIPPED]),
    }
    root = ET.Element("testsuites", attributes)
    suite = ET.SubElement(root, "testsuite", attributes)
    _properties(suite, verdict)
    for check in checks:
        _testcase(suite, check, verdict.preset)
    differences = "\n\n".join(_difference(alike, verdict.hosts) for alike in red_by_kind(verdict))
    if differences:
        ET.SubElement(suite, "system-out").text = differences
    ET.indent(root)
    text: bytes = ET.tostring(root, encoding="us-ascii", xml_declaration=True)
    return text.decode("ascii") + "\n"


def _testcases(verdict: Verdict) -> list[Check]:
    """The checks, and one over the verdict where no check says why it failed."""
    checks = list(verdict.checks)
    is_unexplained = verdict.exit_code != 0 and not failed(verdict)
    if is_unexplained or not checks:
        checks.append(_verdict_check(verdict))
    return checks


def _verdict_check(verdict: Verdict) -> Check:
    status = Status.PASS if verdict.exit_code == 0 else Status.FAIL
    return Check(
        name="verdict", status=status, expected="exit 0", observed=outcome(verdict), details=(verdict.summary,)
    )


def _properties(suite: ET.Element, verdict: Verdict) -> None:
    properties = ET.SubElement(suite, "properties")
    facts = {"preset": verdict.preset, "world_size": verdict.world_size, "exit_code": verdict.exit_code}
    for name, value in (facts | {"summary": verdict.summary}).items():
        ET.SubElement(properties, "property", {"name": name, "value": plain(str(value))})


def _testcase(suite: ET.Element, check: Check, preset: str) -> None:
    parts = ["tpcompile", plain(preset), mode_title(check.mode).replace(" ", "_")]
    classname = ".".join(filter(None, parts))
    case = ET.SubElement(suite, "testcase", {"classname": classname, "name": plain(check.name), "time": "0"})
    text = plain("\n".join(_lines(check)))
    if check.status == Status.FAIL:
        message = plain(f"expected {check.expected}; observed {check.observed}")
        ET.SubElement(case, "failure", {"message": message, "type": "CheckFailed"}).text = text
    elif check.status == Status.SKIPPED:
        ET.SubElement(case, "skipped", {"message": plain(check.observed)})
    else:
        ET.SubElement(case, "system-out").text = text


def _lines(check: Check) -> list[str]:
    lines = [f"expected: {check.expected}", f"observed: {check.observed}"]
    if check.ranks:
        lines.append(blamed_text(check.ranks, is_known=check.is_rank_known))
    return [*lines, *source_lines(check.line), *check.details]


def _difference(alike: Sequence[Divergence], hosts: Mapping[str, Sequence[int]]) -> str:
    divergence = alike[0]
    lines = [f"{divergence.layer.value}: {divergence.title}", divergence.where, *cause_lines(divergence)]
    for group in divergence.groups:
        ranks = f"{named_ranks(group.ranks)}{on_hosts(group.ranks, hosts)}"
        lines += [f"{ranks}: {item_text(group.item)}", *source_lines(group.line, indent="    ")]
    return plain("\n".join(filter(None, [*lines, *more_alike(alike), divergence.advice])))
