"""Flags of the gate, each declared once as a field -> the JobConfig that they ask for.

`tpcompile gate` and repro/tp_compile_repro.py make their command lines from these fields. Without pydantic and torch
until a configuration is loaded: `tpcompile --help` imports this module.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from tpcompile.choices import ALL_MODES, Device, Mode, Profile

if TYPE_CHECKING:
    from tpcompile.config import JobConfig

DEFAULT_PRESETS = {"cpu": "cpu_smoke", "cuda": "wan14b"}
"""Device -> the preset that runs when none is named."""


@dataclass(frozen=True)
class Flag:
    """A field on a command line."""

    spelling: str
    help: str
    metavar: str | None = None
    minimum: float | None = None
    is_of_block: bool = False
    """The flag configures the gate's own block, and has no meaning for a target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """The flags of one run, with or without the launcher; `config` replaces None by defaults."""

    target: Annotated[
        str | None, Flag("--target", "Gate your own program, built by this function.", "MODULE:FUNCTION")
    ] = None
    mode: Annotated[
        Literal[Mode, "all"],
        Flag("--mode", "How the block issues its collectives; see docs/gate.md.", is_of_block=True),
    ] = "C"
    preset: Annotated[
        str | None,
        Flag(
            "--preset",
            "Preset of the block, see `tpcompile presets`; default: wan14b on GPUs, else cpu_smoke.",
            is_of_block=True,
        ),
    ] = None
    layers: Annotated[int | None, Flag("--layers", "Number of blocks in the stack.", is_of_block=True)] = None
    train: Annotated[bool, Flag("--train", "Run the backward pass as well.", is_of_block=True)] = False
    profile: Annotated[
        Profile,
        Flag(
            "--profile",
            "How mode C is run, see docs/profiles.md: graphed is a CUDA graph of the whole step.",
            is_of_block=True,
        ),
    ] = "default"
    dtype: Annotated[
        str | None, Flag("--dtype", "Dtype of the block: float32, bfloat16 or float64.", is_of_block=True)
    ] = None
    overrides: Annotated[
        list[str] | None, Flag("--set", "Set a config key, or a setting of the target; repeatable.", "KEY=VALUE")
    ] = None
    run_dir: Annotated[
        Path | None, Flag("--run-dir", "Directory for all results; default: runs/<utc time>-<preset>-tp<N>-<id>.")
    ] = None
    fusion_baseline: Annotated[
        Path | None,
        Flag(
            "--fusion-baseline", "Fail where kernels or bytes exceed this file of `tpcompile fusion baseline`.", "FILE"
        ),
    ] = None
    device: Annotated[
        Device, Flag("--device", "auto: GPUs when there are any; one_gpu: all ranks share one, through gloo.")
    ] = "auto"
    fault: Annotated[str, Flag("--fault", "Fault to inject into the block; `list` shows them.", is_of_block=True)] = ""
    fault_rank: Annotated[
        int | None, Flag("--fault-rank", "Rank that gets the fault; default: the last.", is_of_block=True)
    ] = None

    def config(self, device: Device) -> JobConfig:
        """The resolved configuration of a run on `device`, which is not "auto". Raises ConfigError as `config.load`."""
        from tpcompile import config

        overrides = list(self.overrides or ())
        if self.fusion_baseline is not None:
            overrides.append(f"gate.fusion_baseline={json.dumps(str(self.fusion_baseline.absolute()))}")
        if self.target is not None:
            self._check_target_alone()
            return config.load_target(self.target, overrides, device=device)
        if self.layers is not None:
            overrides.append(f"block.num_layers={self.layers}")
        if self.dtype:
            overrides.append(f"block.dtype={self.dtype}")
        return config.load(
            self.preset or DEFAULT_PRESETS["cpu" if device == "cpu" else "cuda"],
            overrides,
            modes=ALL_MODES if self.mode == "all" else (self.mode,),
            train=self.train,
            profile=self.profile,
            device=device,
            fault=self.fault,
            fault_rank=self.fault_rank,
        )

    def without_defaults_of_block(self, defaults: Collection[str]) -> Self:
        """This request, where the fields in `defaults` come from a file of defaults.

        With a target, defaults that only concern the gate's own block are ignored.
        """
        if self.target is None:
            return self
        left_out: dict[str, Any] = {
            field.name: field.default
            for field, _, flag in flags_of(type(self))
            if flag.is_of_block and field.name in defaults
        }
        if "overrides" in defaults:
            left_out["overrides"] = [text for text in self.overrides or () if not text.startswith("block.")]
        return dataclasses.replace(self, **left_out)

    def _check_target_alone(self) -> None:
        """Raise ConfigError when a flag of the gate's own block is given besides the target."""
        from tpcompile.errors import ConfigError

        for field, _, flag in flags_of(RunRequest):
            if flag.is_of_block and getattr(self, field.name) != field.default:
                raise ConfigError(f"{flag.spelling} is for the gate's own block; with --target, use --set")


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRequest(RunRequest):
    """A run, and how `tpcompile gate` launches it."""

    nproc: Annotated[int | None, Flag("--nproc", "Number of ranks; default: all GPUs, else 2.")] = None
    performance: Annotated[
        Path | None,
        Flag(
            "--performance",
            "After a pass, fail where kernels or launches exceed this file of `tpcompile bench --write-baseline`.",
            "FILE",
            is_of_block=True,
        ),
    ] = None
    timeout_s: Annotated[float, Flag("--timeout-s", "Seconds until all ranks are killed, exit 124.", minimum=1)] = (
        3600.0
    )


def flags_of(request: type[RunRequest]) -> Iterator[tuple[dataclasses.Field[Any], Any, Flag]]:
    """(field, type of its value without None, flag) of a request, in order."""
    hints = get_type_hints(request, include_extras=True)
    for field in dataclasses.fields(request):
        kind, flag = get_args(hints[field.name])
        if isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        yield field, kind, flag


def add_flags(parser: argparse.ArgumentParser, request: type[RunRequest]) -> None:
    """Give an argparse parser the flags of a request; its namespace then holds the fields."""
    for field, kind, flag in flags_of(request):
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": flag.help}
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        elif get_origin(kind) is list:
            options |= {"action": "append", "metavar": flag.metavar}
        else:
            options["type"] = kind
        parser.add_argument(flag.spelling, **options)
