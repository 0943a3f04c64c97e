"""How a rank of a test ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RankEnd:
    """How a rank ended, or what is known of one that still runs."""

    rank: int
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Reports by phase of the test: setup, call, teardown."""
    error: str = ""
    """Why pytest could not run the test on this rank: a predicate, as in `cannot collect the test`."""
    exit_code: int | None = None
    is_late: bool = False
    """Stopped at the limit of the test."""
    is_stopped: bool = False
    """Stopped because a different rank had failed and this rank did not end by itself."""
    stack: str = ""
    """Stack of a rank that was stopped, innermost frame first."""
    unreported: dict[str, str] = field(default_factory=dict)
    """Output after the last report, by stream."""

    @property
    def has_called(self) -> bool:
        """True when this rank does not run the body of the test any more."""
        return self.exit_code is not None or "call" in self.reports or not self.is_set_up

    @property
    def is_set_up(self) -> bool:
        """False when the setup of the test failed or skipped it."""
        return self.reports.get("setup", {}).get("outcome") in (None, "passed")

    @property
    def is_over(self) -> bool:
        """True when this rank has reported the whole test, and its process ended well."""
        return "teardown" in self.reports and self.exit_code == 0

    @property
    def has_failed(self) -> bool:
        """True when this rank has ended the test without passing it."""
        outcomes = {report["outcome"] for report in self.reports.values()}
        return bool(self.error) or bool(outcomes - {"passed"}) or self.has_died

    @property
    def has_died(self) -> bool:
        """True when the process ended before the test did, without being stopped."""
        is_explained = self.is_late or self.is_stopped or bool(self.error)
        return self.exit_code is not None and not self.is_over and not is_explained
