"""What the ranks compare of one callable, and when: at its first call, before a capture, after a measurement."""

from __future__ import annotations

from collections.abc import Sequence

from tpcompile.errors import ConfigError, DivergenceError
from tpcompile.evidence.records.bounds import Rank
from tpcompile.profiles import chosen
from tpcompile.profiles.agreement import Agreement, Vote
from tpcompile.profiles.call_times import Measurement, Timings, choose
from tpcompile.sink import Sink

logger = Sink("profiles")


class Steps:
    """Steps of one callable; `agreement` is None in a process alone, where there is nothing to compare."""

    def __init__(self, label: str, profile: str, agreement: Agreement | None, *, all_reduce: str = "nccl") -> None:
        self.label, self.profile = label, profile
        self._vote = Vote(program=label, profile=profile, all_reduce=all_reduce)
        self.runs_under = profile
        """What `measured` became, once it is chosen."""
        self._agreement = agreement
        self._capturing = self._vote
        self._choice = chosen.add(label, profile, all_reduce=all_reduce)

    def begin(self, *, candidates: Sequence[str]) -> None:
        """Compare profile and candidates, at the first call of `default` and `measured`."""
        self._agree(self._vote.changed(signature=f"candidates {', '.join(candidates)}"))

    def capture(self, signature: str) -> None:
        """Compare the signature, before each capture."""
        self._capturing = self._vote.changed(signature=signature)
        self._agree(self._capturing)

    def captured(self, problem: str) -> None:
        """Compare the outcome of a capture before its first replay; raises ConfigError where it failed on one rank."""
        if self._agreement is None:
            if problem:
                raise ConfigError(problem)
            return
        found = self._agreement.share(self._capturing, problem, str, decide=dict, result=dict[Rank, str])
        for rank, text in sorted(found.items()):
            if text:
                raise ConfigError(f"{text} (rank {rank})")

    def choose(self, timed: Timings) -> Measurement:
        """Choose one profile for all ranks by the times of all; the choice is part of the environment of the rank."""
        if self._agreement is None:
            found = choose({0: timed})
        else:
            vote = self._vote.changed(signature="its measurement")
            found = self._agreement.share(vote, timed, Timings, decide=choose, result=Measurement)
        if found.profile not in timed:
            raise DivergenceError(f"{self.label} is to run under {found.profile!r}, which this rank has not measured")
        return self.chose(found)

    def chose(self, found: Measurement) -> Measurement:
        """Run under what all ranks have chosen from now on."""
        self.runs_under = found.profile
        self._choice.profile = f"{self.profile}: {found.profile}"
        logger.debug("{} runs under {}", self.label, found.text)
        return found

    def close(self) -> None:
        """Mark the callable as no longer in use."""
        self._choice.is_open = False

    def _agree(self, vote: Vote) -> None:
        if self._agreement is not None:
            self._agreement.agree(vote)
