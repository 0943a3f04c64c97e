"""Fast path -> whether it was proved on shards: the certificate beside its launcher, for source and device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import torch
from pydantic import ValidationError

from tpcompile.errors import ConfigError
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
    """Why nothing can catch it, as declared beside the cases."""


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
    num_mutations: int
    """Mutations of the source and of the arguments that were run through the same cases."""
    survivors: tuple[Survivor, ...]

    @property
    def caught(self) -> float:
        """Share of the mutations that some case caught."""
        return 1 - len(self.survivors) / self.num_mutations if self.num_mutations else 0.0

    def refusal(self, source: str) -> str:
        """Why it does not certify this source; empty when it does."""
        if self.source != source:
            return f"its certificate is for source {self.source}, and this is {source}"
        if not self.worst.ratio <= self.limit:
            return f"its certificate has an error of {self.worst.ratio:.3g} times the plain code's in {self.worst.case}"
        if self.caught < MIN_CAUGHT:
            return (
                f"its cases caught {self.caught:.0%} of {self.num_mutations} mutations, and {MIN_CAUGHT:.0%} are asked"
            )
        return ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_cases} cases, worst error {self.worst.ratio:.3g} times the plain code's "
            f"({self.worst.tensor}, {self.worst.case}), {self.caught:.0%} of {self.num_mutations} mutations caught, "
            f"on {self.device} ({self.machine}), torch {self.torch}, Triton {self.triton}"
        )


def uncertified(path: FastPath) -> str:
    """Why a TP-aware fast path may not run on this device; empty when it may."""
    todo = f"run `tpcompile certify {path.name}`"
    file = certificate_file(path, device_kind())
    certificate = read(file)
    if certificate is None:
        return f"fast path {path.name} has no certificate for {device_kind()} ({file.name} beside {path.line}); {todo}"
    why = certificate.refusal(path.source.sha256)
    return f"fast path {path.name}: {why}; {todo}" if why else ""


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
