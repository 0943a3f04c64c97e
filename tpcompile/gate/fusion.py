"""Kernels of the compiled graphs of this rank -> `manifest.json`, and what they exceed of a baseline."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger

from tpcompile.config import JobConfig
from tpcompile.errors import ConfigError, PreflightError
from tpcompile.evidence.rundir import RunDir
from tpcompile.fusion import baseline as baselines
from tpcompile.fusion.baseline import Baseline, Outcome
from tpcompile.fusion.manifest_records import Manifest
from tpcompile.fusion.recorder import device_name
from tpcompile.gate.checks import COMPARED
from tpcompile.recording import CaptureSession
from tpcompile.torch_api.compiler import triton_version


@dataclass(frozen=True)
class FusionCheck:
    """The kernels that all ranks must agree on, against the baseline of the run, if it has one."""

    modes: tuple[str, ...]
    """Modes whose graphs count."""
    path: Path | None = None
    baseline: Baseline | None = None

    @classmethod
    def of(cls, config: JobConfig, device: torch.device) -> FusionCheck:
        """Raises ConfigError for a baseline that cannot be used in this run."""
        modes = tuple(mode for mode in config.modes if mode in COMPARED)
        path = config.gate.fusion_baseline
        if path is None:
            return cls(modes)
        if config.compile.backend != "inductor" or not modes:
            raise ConfigError("--fusion-baseline needs compile.backend=inductor, and mode C, all or a target")
        baseline = baselines.read(path)
        build = {"torch": torch.__version__, "triton": triton_version(), "device": device_name(device.type)}
        baselines.check_same_build(baseline, **build, path=path)
        return cls(modes, path, baseline)

    def manifest(self, session: CaptureSession) -> Manifest:
        """Manifest of the graphs that were compiled in these modes so far."""
        return session.manifest(phases=tuple(f"{mode}/" for mode in self.modes))

    def outcome(self, session: CaptureSession) -> Outcome | None:
        """What exceeds the baseline; None without one."""
        if self.baseline is None:
            return None
        try:
            return baselines.compare(self.baseline, self.manifest(session))
        except Exception as error:  # the verdict says so
            logger.exception("the kernels of this rank cannot be read; please report this")
            return Outcome(why_not=f"the kernels of this rank cannot be read: {type(error).__name__}: {error}")

    def tighten(self, session: CaptureSession) -> None:
        """Take what has improved out of the baseline."""
        outcome = self.outcome(session)
        if self.path is None or outcome is None or outcome.better is None:
            return
        try:
            baselines.write(outcome.better, self.path)
        except PreflightError as error:
            logger.warning("this run is better than its baseline, which stays as it is: {}", error)

    def keep(self, session: CaptureSession, directory: RunDir, *, rank: int) -> None:
        """Write `rank_N/manifest.json`, for `tpcompile fusion`. Raises PreflightError when the disk is full."""
        try:
            manifest = self.manifest(session)
        except Exception:  # the verdict does not need it
            logger.exception("the kernels of this rank cannot be read; please report this")
            return
        if manifest.graphs:
            directory.write_text(f"rank_{rank}/manifest.json", manifest.to_json(indent=1) + "\n")
