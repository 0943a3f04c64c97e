"""Fast path -> whether it was proved on shards: the certificate beside its launcher, for source and device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from pydantic import ValidationError

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Frozen
from tpcompile.fastpath.registry import FastPath

SCHEMA_VERSION = 1
MAX_RATIO = 2.5
"""Largest error that passes, as a multiple of the single-device error of the plain code in the same dtype."""
MIN_CAUGHT = 0.95
"""Least share of the mutations that the cases must catch."""


class Survivor(Frozen):
    """A mutation that no case caught."""

    place: str
    """`file:line`."""
    change: str
    reason: str = ""
    """Why nothing can catch it, as declared beside the cases; empty when nothing is declared."""


class Power(Frozen):
    """What the cases see: mutations of the source and of the arguments that were run through them."""

    device: str
    num_mutations: int
    survivors: tuple[Survivor, ...]

    @property
    def caught(self) -> float:
        """Share of the mutations that some case caught, of those that can be caught."""
        unexplained = sum(not survivor.reason for survivor in self.survivors)
        reachable = self.num_mutations - len(self.survivors) + unexplained
        return 1 - unexplained / reachable if reachable else 0.0

    def __str__(self) -> str:
        explained = sum(bool(survivor.reason) for survivor in self.survivors)
        reachable = self.num_mutations - explained
        return f"{self.caught:.1%} of {reachable} mutations caught ({explained} more change nothing)"


class Worst(Frozen):
    """The largest error of all cases."""

    ratio: float
    case: str
    tensor: str


class Certificate(Frozen):
    """What was run to prove a fast path, and what came of it."""

    schema_version: int = SCHEMA_VERSION
    name: str
    tp: str
    source: str
    """Hash of the source that was run."""
    device: str
    """`sm90` for a GPU of that compute capability, `interpreter`, or `cpu`."""
    machine: str
    """Name of the GPU or processor."""
    torch: str
    triton: str
    command: str
    tp_sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    num_cases: int
    worst: Worst
    limit: float = MAX_RATIO
    power: Power

    @property
    def is_of_gpu(self) -> bool:
        """True when its cases ran on a GPU."""
        return self.device.startswith("sm")

    def refusal(self, source: str) -> str:
        """Why it does not certify this source; empty when it does."""
        if self.source != source:
            return f"its certificate is for source {self.source}, and this is {source}"
        if not self.worst.ratio <= self.limit:
            return f"its certificate has an error of {self.worst.ratio:.3g} times the plain code's in {self.worst.case}"
        if self.power.caught < MIN_CAUGHT:
            return f"in its certificate {self.power}; {MIN_CAUGHT:.0%} are asked"
        return ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_cases} cases, worst error {self.worst.ratio:.3g} times the plain code's "
            f"({self.worst.tensor}, {self.worst.case}), {self.power}, on {self.device} ({self.machine}), "
            f"torch {self.torch}, Triton {self.triton}"
        )


def uncertified(path: FastPath) -> str:
    """Why a TP-aware fast path may not run on this device; empty when it may.

    On a GPU a certificate from a GPU counts, whichever it was; elsewhere any.
    """
    on_gpu = device_kind().startswith("sm")
    files = certificates_of(path)
    refusals = [certificate.refusal(path.source.sha256) for certificate in files if certificate.is_of_gpu or not on_gpu]
    if "" in refusals:
        return ""
    why = first(refusals) or f"it has no certificate from a {'GPU' if on_gpu else 'machine'}"
    return f"fast path {path.name} at {path.line}: {why}; run `tpcompile certify {path.name}`"


def power_of(path: FastPath) -> Power | None:
    """What the cases see, from a certificate of this source that was made without a GPU; None when there is none."""
    made = (one for one in certificates_of(path) if one.source == path.source.sha256 and not one.is_of_gpu)
    return first(one.power for one in made)


def certificates_of(path: FastPath) -> list[Certificate]:
    """All that lie beside the launcher."""
    files = sorted(certificate_file(path, "x").parent.glob(f"{path.name}.*.json"))
    return [found for file in files if (found := read(file)) is not None]


def certificate_file(path: FastPath, device: str) -> Path:
    """`certificates/NAME.DEVICE.json` beside the file of the launcher."""
    return Path(path.line.file).parent / "certificates" / f"{path.name}.{device}.json"


def read(file: Path) -> Certificate | None:
    """The certificate; None when there is none. Raises ConfigError when the file is not one."""
    try:
        return Certificate.model_validate_json(file.read_text())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise ConfigError(
            f"{file} is no certificate: {error.errors()[0]['msg']}; remove it, and certify again"
        ) from error


def write(certificate: Certificate, path: FastPath) -> Path:
    """Write it beside the launcher, and return where."""
    file = certificate_file(path, certificate.device)
    file.parent.mkdir(exist_ok=True)
    file.write_text(certificate.model_dump_json(indent=2) + "\n")
    return file


@cache
def device_kind() -> str:
    """What kernels run on in this process: `sm90`, `interpreter` or `cpu`."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm{major}{minor}"
    return "interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else "cpu"
