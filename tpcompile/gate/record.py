"""What this rank has observed so far -> its record, in memory and in the run directory."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from tpcompile.config import JobConfig
from tpcompile.evidence.records import RankRecord, Verdict
from tpcompile.evidence.rundir import RunDir
from tpcompile.gate.fusion import FusionCheck
from tpcompile.gate.measurements import GateFacts
from tpcompile.gate.phases import Phases
from tpcompile.ranks.domain import Domain
from tpcompile.ranks.env import RankEnv
from tpcompile.recording import CaptureSession


@dataclass
class Evidence:
    """One rank's run as its record has it; the later fields are set while it runs."""

    config: JobConfig
    env: RankEnv
    directory: RunDir
    fusion: FusionCheck
    session: CaptureSession | None = None
    phases: Phases | None = None
    job: str = ""
    domain: Domain | None = None
    """The ranks that must agree with this one; None is all of them."""

    def write_config(self, device: torch.device) -> None:
        """Write `config.json` and `run.json`, the only file that names a time and a machine, on rank 0."""
        if self.env.rank == 0:
            self._write_config(device)

    def write_for_node(self, verdict: Verdict) -> None:
        """Write what rank 0 writes elsewhere: the folder of this node is its own."""
        if self.directory.write_verdict(verdict):
            self._write_config(torch.device("cpu"))

    def _write_config(self, device: torch.device) -> None:
        self.directory.write_config(self.config.model_dump_json(indent=1))
        facts = {
            "command": " ".join(sys.argv),
            "started": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            "host": platform.node(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "config_sha256": self.config.sha256,
        }
        self.directory.write_run(facts)

    def written(self) -> RankRecord:
        """All evidence of this rank so far, which is in the run directory then. Raises PreflightError if it cannot."""
        session = self.session
        assert session is not None, "no session yet"
        place: dict[str, Any] = {}
        if self.domain is not None:
            members = len(self.domain.members)
            place = {"domain": self.domain.name, "coordinate": self.domain.coordinate, "tp_size": members}
            place["coordinates"] = self.domain.coordinates
        facts = self.phases.facts if self.phases else GateFacts()
        facts = facts.changed(fusion=self.fusion.outcome(session))
        record = session.record(
            rank=self.env.rank,
            world_size=self.env.world_size,
            tp_aware=self.config.gate.tp_aware_ops,
            facts=facts.model_dump(mode="json"),
            job=self.job,
            **place,
        )
        self.directory.write_record(record)
        self.fusion.keep(session, self.directory, rank=self.env.rank)
        return record
