"""Preset name, or target, + `key=value` overrides -> frozen `JobConfig`, resolved and hashed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tpcompile.block_args import BlockArgs
from tpcompile.choices import TARGET, AllReduce, AnyMode, Device, Mode, Profile
from tpcompile.errors import ConfigError

_TARGET = r"^[\w.]+:\w+$"
"""`package.module:function`."""

_HERE = Path(__file__).resolve().parent


class Frozen(BaseModel):
    """Immutable; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class BlockConfig(BlockArgs):
    """The blocks that the gate compiles, and the input that it feeds them."""

    num_layers: int = Field(gt=0)
    """Blocks in the compiled stack."""
    batch: int = Field(gt=0)
    """Batch size B of the input."""
    seq_len: int = Field(gt=1)
    """Tokens S of the input."""
    context_len: int | None = Field(default=None, gt=0)
    """Tokens T of the context that the gate feeds; None is seq_len."""
    masked: bool = False
    """The gate feeds a boolean mask over the keys, [B, 1, 1, S]."""


class CompileConfig(Frozen):
    """How the stack is handed to torch.compile."""

    backend: Literal["inductor", "aot_eager", "eager"] = "inductor"
    """Backend of torch.compile; `eager` has no lowered layers, so less is proved."""
    dynamic: bool | None = None
    """`dynamic=` of torch.compile; None is torch's automatic dynamic shapes."""
    fast_paths: Literal["off", "measured", "all"] = "measured"
    """Fused kernels in the stack of mode C: none, those that were measured to be faster than Inductor's code on this
    GPU, or all that can run."""

    all_reduce: AllReduce = "nccl"
    """Sums over the ranks in compiled graphs of mode C: all by NCCL, or each by the algorithm that was measured to be
    fastest at its size on this GPU; needs the backend `inductor`."""

    @field_validator("fast_paths", mode="before")
    @classmethod
    def _read_off(cls, value: Any) -> Any:
        """YAML reads `off` as false."""
        return "off" if value is False else value

    @model_validator(mode="after")
    def _check_all_reduce(self) -> Self:
        if self.all_reduce == "by_size" and self.backend != "inductor":
            raise ValueError(f"all_reduce=by_size needs backend=inductor, and it is {self.backend}")
        return self


class Allow(Frozen):
    """One intended difference between ranks: shown in every report, never hidden."""

    layer: Literal["environment", "inputs", "graph", "guards", "lowered", "kernels", "taint"]
    """Layer the difference is in; `taint` is for what depends on the rank while the graphs agree. Collectives cannot
    be allowed, they hang."""
    contains: str = Field(min_length=3)
    """Text that the differing item contains; of a taint, also its `file:line` and code."""
    reason: str = Field(min_length=10)
    """Why it is intended; printed in the report."""


class GateConfig(Frozen):
    """Calls, limits and intended differences of the gate."""

    steady_calls: int = Field(default=10, gt=0)
    """Calls after the first in which nothing may compile."""
    resized_seq_len: int | None = Field(default=None, gt=1)
    """Tokens after the one change of sequence length; None is seq_len - max(1, seq_len // 4)."""
    error_ratio: float = Field(default=2.5, gt=1)
    """Largest allowed error, as a multiple of the single-device error in the same dtype."""
    store_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for a rank, at an exchange, a phase or in a collective, before it is named as missing."""
    phase_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds one phase (compile, steady calls, ...) may take before the gate stops with exit 124."""
    tp_aware_ops: tuple[str, ...] = ()
    """Custom ops, kernels, passes and backends declared right on a shard, as `namespace::op` or name of the function;
    others fail the gate."""
    allow: tuple[Allow, ...] = ()
    """Intended differences between ranks."""
    fusion_baseline: Path | None = None
    """File of `tpcompile fusion baseline`: more launches or bytes than it has fail the gate."""
    taint: Literal["list", "fail"] = "list"
    """What a rank-dependent guard or constant does that leaves the graphs equal today: `list` it in the report, or
    `fail` the gate, for those that are certain and not in `allow`."""


class JobConfig(Frozen):
    """What every run of the gate needs, resolved."""

    preset: str
    """What is run: the name of the YAML file in configs/ this came from, or of the target."""
    compile: CompileConfig = CompileConfig()
    gate: GateConfig = GateConfig()
    modes: tuple[AnyMode, ...]
    """Modes to run, in order."""
    device: Device = "auto"
    """Device of the ranks."""

    @property
    def title(self) -> str:
        """What is run, for people."""
        return f"preset {self.preset}"

    @property
    def label(self) -> str:
        """What is run, as a part of a file's name."""
        return self.preset

    @property
    def sha256(self) -> str:
        """Digest of the resolved configuration; all ranks must agree on it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError when it cannot be spread over `tp` ranks."""


class TargetConfig(JobConfig):
    """A run of the gate on a program of the user's own."""

    target: str = Field(pattern=_TARGET)
    """`package.module:build`, a function that makes the program; see `tpcompile.Target`."""
    settings: dict[str, Any] = {}
    """What `build` finds in `ctx.settings`."""
    modes: tuple[Literal["target"], ...] = (TARGET,)

    @property
    def title(self) -> str:
        """What is run, for people."""
        return f"target {self.target}"

    @property
    def label(self) -> str:
        """What is run, as a part of a file's name."""
        return self.target.replace(":", "-")

    def declaring(self, *, allow: Iterable[Sequence[str]], tp_aware: Iterable[str]) -> TargetConfig:
        """The same with the declarations of the target. Raises ConfigError for an `allow` that cannot be one."""
        data = self.model_dump()
        names = tuple(Allow.model_fields)
        data["gate"]["allow"] += tuple(dict(zip(names, one, strict=False)) for one in allow)
        data["gate"]["tp_aware_ops"] = tuple(dict.fromkeys((*self.gate.tp_aware_ops, *tp_aware)))
        return _validated(TargetConfig, data)


class RunConfig(JobConfig):
    """A run of the gate on its own block."""

    block: BlockConfig
    modes: tuple[Mode, ...] = ("C",)
    train: bool = False
    """Forward and backward instead of forward only."""
    profile: Profile = "default"
    """Execution profile of mode C, see `tpcompile.profiles`; A and B run as they are."""
    seed: int = 0
    """Seed of weights and inputs, equal on all ranks."""
    fault: str = ""
    """Known fault to inject (see `tpcompile gate --fault list`), so that the gate must fail; empty for none."""
    fault_rank: int | None = None
    """Rank that gets the fault; None is the last rank."""

    @property
    def resized_seq_len(self) -> int:
        """Tokens of the call in which the sequence length changes.

        By default a quarter less; in the sequence-parallel form rounded down to a power of two that is at most 64, or a
        multiple of 64, so that the usual tp sizes divide it.
        """
        seq = self.block.seq_len
        shorter = max(2, seq - max(1, seq // 4))
        if self.block.sequence_parallel:
            power_of_two = 1 << (seq // 2).bit_length() - 1
            step = min(64, power_of_two)
            shorter = shorter // step * step
        return self.gate.resized_seq_len or shorter

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.resized_seq_len > self.block.seq_len:
            raise ValueError(
                f"gate.resized_seq_len={self.resized_seq_len} is more than block.seq_len={self.block.seq_len}, the "
                "tokens of the single-device reference; give fewer"
            )
        return self

    @model_validator(mode="after")
    def _check_profile(self) -> Self:
        if self.profile != "default" and "C" not in self.modes:
            raise ValueError(f"profile={self.profile} is of mode C, and the modes are {', '.join(self.modes)}; add C")
        if self.profile == "max-autotune" and self.compile.backend != "inductor":
            raise ValueError(f"profile=max-autotune needs compile.backend=inductor, and it is {self.compile.backend}")
        if self.profile == "graphed" and self.device in ("cpu", "one_gpu"):
            raise ValueError(
                f"profile=graphed needs a GPU for each rank, and the device is {self.device}: collectives through the "
                "host are in no CUDA graph; use --profile default"
            )
        return self

    def check_tp(self, tp: int) -> None:
        """Raise ConfigError when the block, or the tokens of its sequence-parallel form, cannot be spread over `tp`."""
        self.block.check_tp(tp)
        if not self.block.sequence_parallel:
            return
        lengths = {"block.seq_len": self.block.seq_len, "gate.resized_seq_len": self.resized_seq_len}
        bad = [f"{name}={length}" for name, length in lengths.items() if length % tp]
        if bad:
            numbers = ", ".join(bad)
            raise ConfigError(f"tp={tp} does not divide {numbers}; sequence_parallel needs multiples of {tp}, set them")


J = TypeVar("J", bound=JobConfig)


def preset_paths() -> dict[str, Path]:
    """Preset name -> YAML file, from the installed package or the repository's configs/."""
    folders = (_HERE / "configs", _HERE.parent / "configs")
    return {p.stem: p for folder in folders if folder.is_dir() for p in sorted(folder.glob("*.yaml"))}


def parse(text: str) -> JobConfig:
    """The configuration in the text of a `config.json`. Raises ValidationError."""
    return parsed(json.loads(text))


def parsed(data: dict[str, Any]) -> JobConfig:
    """The configuration in a `config.json`. Raises ValidationError."""
    return (TargetConfig if "target" in data else RunConfig).model_validate(data)


def load_target(target: str, overrides: Sequence[str] = (), **fields: Any) -> TargetConfig:
    """The configuration of a target: overrides that begin with `gate.` or `compile.`, all others are its settings.

    Raises ConfigError for a target that is not `package.module:build`, an unknown key or a value out of range.
    """
    if not re.fullmatch(_TARGET, target):
        wanted = "write MODULE:FUNCTION, the module as Python imports it, such as my_package.my_model:build"
        raise ConfigError(f"--target {target}: {wanted}")
    data: dict[str, Any] = {"preset": target, "target": target, "settings": {}}
    for override in overrides:
        section = data if override.startswith(("gate.", "compile.")) else data["settings"]
        _apply(section, override)
    return _validated(TargetConfig, data | fields)


def load(preset: str, overrides: list[str] | None = None, **fields: Any) -> RunConfig:
    """Read a preset, apply `key=value` overrides (dotted keys, YAML values), then set `fields`.

    Raises ConfigError for an unknown preset, an unknown key or a value out of range.
    """
    paths = preset_paths()
    if preset not in paths:
        raise ConfigError(f"unknown preset {preset!r}; choose from {', '.join(paths) or 'none (configs/ is missing)'}")
    data = yaml.safe_load(paths[preset].read_text()) or {}
    data["preset"] = preset
    for override in overrides or []:
        _apply(data, override)
    return _validated(RunConfig, data | fields)


def _validated(kind: type[J], data: dict[str, Any]) -> J:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_one_line(kind, error)) from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {override!r}: write key=value, e.g. --set block.seq_len=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {str(error).splitlines()[0]}") from None
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {override!r}: {parent!r} is a value, not a section")
    data[last] = value


def _one_line(kind: type[JobConfig], error: ValidationError) -> str:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        *parents, key = path
        section = ".".join(parents) or "the top level"
        return f"unknown config key {key!r}; {section} has {', '.join(_keys(kind, parents))}"
    message = first["msg"].removeprefix("Value error, ")
    if path in ([], ["block"], ["compile"]):  # a check over several fields names them itself
        return message
    return f"{'.'.join(path)}={first['input']!r}: {message}"


def _keys(kind: type[JobConfig], parents: list[str]) -> list[str]:
    """Keys of the innermost section on the path."""
    model: type[BaseModel] = kind
    for parent in parents:
        field = model.model_fields.get(parent)
        section = field.annotation if field else None
        if not isinstance(section, type) or not issubclass(section, BaseModel):
            break
        model = section
    return sorted(model.model_fields)
