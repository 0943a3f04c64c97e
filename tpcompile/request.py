"""Flags of the gate, each declared once as a field -> the RunConfig that they ask for.

`tpcompile gate` and repro/tp_compile_repro.py make their command lines from these fields. Without pydantic and torch
until a configuration is loaded: `tpcompile --help` imports this module.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from tpcompile.config import RunConfig

DEFAULT_PRESETS = {"cpu": "cpu_smoke", "cuda": "wan14b"}
"""Device -> the preset that runs when none is named."""


@dataclass(frozen=True)
class Flag:
    """How a field is spelled on a command line."""

    help: str
    name: str = ""
    """Empty for the name of the field: `run_dir` is `--run-dir`."""
    metavar: str | None = None
    minimum: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What one run is asked for, with or without the launcher; `config` replaces None by defaults."""

    mode: Annotated[Literal["A", "B", "C", "all"], Flag("How collectives are issued.")] = "C"
    preset: Annotated[str | None, Flag("See `tpcompile presets`; default: wan14b on GPUs, else cpu_smoke.")] = None
    layers: Annotated[int | None, Flag("Blocks in the stack.")] = None
    train: Annotated[bool, Flag("Forward and backward.")] = False
    dtype: Annotated[str | None, Flag("float32, bfloat16 or float64.")] = None
    overrides: Annotated[list[str] | None, Flag("Any config key; repeatable.", name="--set", metavar="KEY=VALUE")] = (
        None
    )
    run_dir: Annotated[Path | None, Flag("Default: runs/<utc time>-<preset>-tp<N>.")] = None
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("auto: GPUs when there are any.")] = "auto"
    fault: Annotated[str, Flag("Known fault to inject, to watch the gate go red.")] = ""
    fault_rank: Annotated[int | None, Flag("Rank that gets the fault; default: the last.")] = None

    def config(self, device: str) -> RunConfig:
        """The resolved configuration of a run on `device`, "cpu" or "cuda". Raises ConfigError as `config.load`."""
        from tpcompile import config

        overrides = list(self.overrides or ())
        if self.layers is not None:
            overrides.append(f"block.num_layers={self.layers}")
        if self.dtype:
            overrides.append(f"block.dtype={self.dtype}")
        return config.load(
            self.preset or DEFAULT_PRESETS[device],
            overrides,
            modes=config.ALL_MODES if self.mode == "all" else (self.mode,),
            train=self.train,
            device=device,
            fault=self.fault,
            fault_rank=self.fault_rank,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GateRequest(RunRequest):
    """A run, and how `tpcompile gate` launches it."""

    nproc: Annotated[int | None, Flag("Ranks; default: all GPUs, else 2.")] = None
    timeout_s: Annotated[float, Flag("Seconds until everything is killed, exit 124.", minimum=1)] = 3600.0


@dataclass(frozen=True)
class Declared:
    """A field of a request, as the builder of a command line needs it."""

    field: str
    spelling: str
    kind: Any
    """Type of the value; of an optional field without the None."""
    default: Any
    flag: Flag


def flags_of(request: type[RunRequest]) -> Iterator[Declared]:
    """The flags of a request, in order."""
    hints = get_type_hints(request, include_extras=True)
    for field in dataclasses.fields(request):
        kind, flag = get_args(hints[field.name])
        if isinstance(kind, UnionType):
            kind = get_args(kind)[0]
        spelling = flag.name or "--" + field.name.replace("_", "-")
        yield Declared(field.name, spelling, kind, field.default, flag)


def add_flags(parser: argparse.ArgumentParser, request: type[RunRequest]) -> None:
    """Give an argparse parser the flags of a request; its namespace then holds the fields."""
    for declared in flags_of(request):
        options: dict[str, Any] = {"metavar": declared.flag.metavar, "type": declared.kind}
        if declared.kind is bool:
            options = {"action": "store_true"}
        elif get_origin(declared.kind) is list:
            options |= {"type": str, "action": "append"}
        elif get_origin(declared.kind) is Literal:
            options |= {"type": str, "choices": get_args(declared.kind)}
        help_text, default = declared.flag.help, declared.default
        parser.add_argument(declared.spelling, dest=declared.field, default=default, help=help_text, **options)
