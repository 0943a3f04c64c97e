"""Fast path -> whether it was proved on shards: the certificate beside its launcher, for source and device."""

from __future__ import annotations

import os
from collections.abc import Collection
from enum import StrEnum
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from tpcompile.errors import ConfigError
from tpcompile.evidence.iterables import first
from tpcompile.evidence.records import Frozen
from tpcompile.evidence.records.reader import read_record
from tpcompile.fastpath.registry import FastPath, dtype_name
from tpcompile.torch_api import binaries
from tpcompile.torch_api.tested_versions import is_tested_or

SCHEMA_VERSION = 3
"""Incremented when a certificate changes shape, or the hash of a source is made in a different way."""
TP_SIZES = (2, 1, 4, 8)
"""Default numbers of ranks to certify. Two comes first, since it catches most mutations."""
MAX_RATIO = 2.5
"""Largest error that passes, as a multiple of the single-device error of the plain code in the same dtype."""
MIN_MUTATIONS = 20
"""Fewest mutations that change what is computed."""
MIN_CAUGHT = 0.95
"""Least share of those that the cases must catch."""
MIN_LIBRARY_MUTATIONS = 5
"""Fewest mutations that the cases reach, where no Triton kernel is launched and they catch every one of them."""
_CERTIFIED: set[tuple[Path, str, int, tuple[str, ...]]] = set()
"""(file, source, ranks, dtypes) that are known to be certified, so that an eager call does not read files each time."""


class Kind(StrEnum):
    """Why no case caught a mutation."""

    MISSED = "missed"
    """The cases should have caught it: no reason is declared."""
    EQUIVALENT = "equivalent"
    """It changes no result."""
    UNREACHED = "unreached"
    """It is wrong only where no case can go: an argument of 2^31 elements, code that the interpreter does not run."""


class Survivor(Frozen):
    """A mutation that no case caught."""

    place: str
    """`file:line`."""
    change: str
    kind: Kind = Kind.MISSED
    reason: str = ""
    """Why no case catches it, as declared beside the cases; empty for a missed mutation."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.place}: {self.change}: {self.reason or 'NO REASON'}"


class Power(Frozen):
    """How sensitive the cases are: the mutations of source and arguments that were run, and those that survived."""

    device: str
    num_mutations: int
    survivors: tuple[Survivor, ...]

    @property
    def num_wrong(self) -> int:
        """Mutations that change what is computed."""
        return self.num_mutations - self._number(Kind.EQUIVALENT)

    @property
    def num_reached(self) -> int:
        """Mutations that change what is computed and that the cases can reach."""
        return self.num_wrong - self._number(Kind.UNREACHED)

    @property
    def caught(self) -> float:
        """Share of the mutations that change what is computed which some case caught."""
        return self._num_caught / self.num_wrong if self.num_wrong else 0.0

    @property
    def caught_of_reached(self) -> float:
        """Share of the mutations that the cases can reach which some case caught."""
        return self._num_caught / self.num_reached if self.num_reached else 0.0

    @property
    def _num_caught(self) -> int:
        return self.num_mutations - len(self.survivors)

    def _number(self, kind: Kind) -> int:
        return sum(survivor.kind == kind for survivor in self.survivors)

    def __str__(self) -> str:
        reached = f"{self.caught_of_reached:.1%} of the {self.num_reached} that the cases can reach"
        same = self._number(Kind.EQUIVALENT)
        return f"{self.caught:.1%} of {self.num_wrong} mutations caught, {reached} ({same} more change nothing)"


class Worst(Frozen):
    """The largest error of all cases."""

    ratio: float
    case: str
    tensor: str


class Certificate(Frozen):
    """What was run to prove a fast path, and the results."""

    schema_version: int = SCHEMA_VERSION
    name: str
    tp: str
    source: str
    """Hash of the source that was run."""
    libraries: dict[str, str] = {}
    """Packages that it calls, without torch and Triton -> versions."""
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
    launches_kernels: bool = True
    """False when it only calls a library: its source is short, so it may have few mutations if all are caught."""
    binaries: dict[str, str] = {}
    """Kernel and hash of what it was compiled for -> hashes of its PTX and its machine code; empty without a GPU."""

    @property
    def is_of_gpu(self) -> bool:
        """True when its cases ran on a GPU."""
        return self.device.startswith("sm")

    def refusal(self, source: str, *, tp: int | None = None, dtypes: Collection[str] = ()) -> str:
        """Why it does not certify this source, for this number of ranks and these element types; empty when it does.

        A number of ranks that no case had is refused: heads, replicas and padding differ with each number.
        """
        if self.schema_version != SCHEMA_VERSION:
            return (
                f"its certificate has schema {self.schema_version}, whose source hash is made in a different way; "
                f"this is schema {SCHEMA_VERSION}"
            )
        if self.source != source:
            return f"its certificate is for source {self.source}, and this is {source}"
        if not is_tested_or(self.torch, torch.__version__):
            return f"its certificate was made with torch {self.torch}, and this is {torch.__version__}"
        if tp is not None and tp not in self.tp_sizes:
            return f"its certificate is for {_joined(self.tp_sizes)} ranks, and this is a group of {tp}"
        unproved = sorted(set(dtypes).difference(self.dtypes))
        if unproved:
            return f"its certificate is for {_joined(self.dtypes)}, and this is {_joined(unproved)}"
        return self._weakness()

    def _weakness(self) -> str:
        """Why the results prove too little; empty when they are sufficient."""
        power = self.power
        if not self.worst.ratio <= min(self.limit, MAX_RATIO):  # NaN is no proof
            return f"its certificate has an error of {self.worst.ratio:.3g} times the plain code's in {self.worst.case}"
        if power.num_wrong >= MIN_MUTATIONS:
            is_enough = power.caught >= MIN_CAUGHT
            return "" if is_enough else f"in its certificate {power}; at least {MIN_CAUGHT:.0%} are required"
        if self.launches_kernels:
            return f"its certificate has {power.num_wrong} mutations; at least {MIN_MUTATIONS} are required"
        if power.num_reached < MIN_LIBRARY_MUTATIONS:
            return (
                f"its certificate has {power.num_reached} mutations that the cases can reach; of a call of a library "
                f"at least {MIN_LIBRARY_MUTATIONS} are required"
            )
        if power.caught_of_reached < 1.0:
            return (
                f"in its certificate {power}; with fewer than {MIN_MUTATIONS} mutations, the cases must catch all that "
                "they can reach"
            )
        return ""

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_cases} cases, worst error {self.worst.ratio:.3g} times the plain code's "
            f"({self.worst.tensor}, {self.worst.case}), {self.power}, on {self.device} ({self.machine}), "
            f"torch {self.torch}, Triton {self.triton}, {len(self.binaries) or 'no'} compiled kernels"
        )


def uncertified(path: FastPath, *, tp: int | None = None, dtypes: Collection[str] = ()) -> str:
    """Why a TP-aware fast path may not run on this device, on `tp` ranks, with these dtypes; empty when it may.

    On a GPU, the certificate must be from a GPU, of any model; elsewhere any certificate counts. Without `dtypes`, the
    dtypes that the fast path is declared for must be certified.
    """
    on_gpu = device_kind().startswith("sm")
    files = list(certificates_of(path))
    missing = "it has no certificate"
    if on_gpu:
        files = [one for one in files if one.is_of_gpu]
        missing = "it has no certificate from a GPU"
    wanted = dtypes or tuple(map(dtype_name, path.dtypes))
    where = f"fast path {path.name} at {path.line}"
    if path.source.refused:
        return f"{where}: {path.source.refused}"
    refusals = []
    for one in files:
        refusal = one.refusal(path.source.sha256, tp=tp, dtypes=wanted)
        refusals.append(refusal or _made_with(one, path))
    if "" in refusals:
        return ""
    why = first(refusals) or missing
    return f"{where}: {why}; run `tpcompile certify {path.name} --import MODULE{_sizes(files, tp)}`"


def binaries_of(path: FastPath) -> dict[str, str]:
    """What its Triton kernels were compiled to in this process, for `Certificate.binaries`."""
    kernels = path.source.compiled.items()
    return {f"{name} {purpose}": code for name, kernel in kernels for purpose, code in binaries.compiled(kernel)}


def _made_with(one: Certificate, path: FastPath) -> str:
    """The first library or kernel that differs from those that a certificate was made with; empty when none does.

    Code of the same source, arguments and Triton differs where something else decides what is compiled.
    """
    for name, now in path.source.libraries.items():
        then = one.libraries.get(name, "no version")
        if then != now:
            return f"its certificate was made with {name} {then}, and this is {now}"
    if (one.device, one.triton) != (device_kind(), _triton()):
        return ""
    for key, now in sorted(binaries_of(path).items()):
        then = one.binaries.get(key, now)
        if then != now:
            kernel = key.partition(" ")[0]
            return f"its certificate is for different code of {kernel}: PTX and machine code {then}, and this is {now}"
    return ""


@cache
def _triton() -> str:
    return version("triton")


def is_certified(path: FastPath, *, tp: int, dtypes: Collection[str]) -> bool:
    """True when it may run on the shards of `tp` ranks on this device, which is then cached."""
    key = (certificate_file(path, device_kind()), path.source.sha256, tp, tuple(sorted(dtypes)))
    if key not in _CERTIFIED and not uncertified(path, tp=tp, dtypes=dtypes):
        _CERTIFIED.add(key)
    return key in _CERTIFIED


def power_of(path: FastPath) -> Power | None:
    """`Power` from a certificate of this source that was made without a GPU; None when there is none."""
    sha256 = path.source.sha256
    made = [one for one in certificates_of(path) if one.schema_version == SCHEMA_VERSION and one.source == sha256]
    return first(one.power for one in made if not one.is_of_gpu)


def certificates_of(path: FastPath) -> list[Certificate]:
    """All certificates beside the launcher."""
    files = sorted(certificate_file(path, "x").parent.glob(f"{path.name}.*.json"))
    return [found for file in files if (found := read(file)) is not None]


def certificate_file(path: FastPath, device: str) -> Path:
    """`certificates/NAME.DEVICE.json` beside the file of the launcher."""
    return Path(path.line.file).parent / "certificates" / f"{path.name}.{device}.json"


def read(file: Path) -> Certificate | None:
    """The certificate; None when there is none. Raises ConfigError when the file is not one."""
    try:
        return read_record(Certificate, file)
    except FileNotFoundError:
        return None
    except ConfigError as error:
        raise ConfigError(f"{error}; remove it, and certify again") from None


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


def _sizes(files: Collection[Certificate], tp: int | None) -> str:
    """The option that also certifies `tp` ranks; empty when `tp` is among the default sizes."""
    if tp is None or tp in TP_SIZES:
        return ""
    known = {size for one in files for size in one.tp_sizes} or set(TP_SIZES)
    return " --tp " + ",".join(map(str, sorted({*known, tp})))


def _joined(values: Collection[object]) -> str:
    return ", ".join(map(str, values))
