from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from tpcompile.choices import Device
from tpcompile.cli.gate import gate
from tpcompile.config import RunConfig
from tpcompile.errors import ConfigError
from tpcompile.request import GateRequest, RunRequest, add_flags, flags_of


def parsed(*arguments: str) -> RunRequest:
    """What argparse makes of a command line, as in repro/tp_compile_repro.py."""
    parser = argparse.ArgumentParser()
    add_flags(parser, RunRequest)
    return RunRequest(**vars(parser.parse_args(arguments)))


def test_argparse_reads_every_kind_of_flag() -> None:
    text = "--mode all --train --layers 3 --set a=1 --set b=[2] --run-dir x --device cpu --fault raises --fault-rank 1"
    assert parsed(*text.split()) == RunRequest(
        mode="all", train=True, layers=3, overrides=["a=1", "b=[2]"], run_dir=Path("x"), device="cpu", fault="raises",
        fault_rank=1,
    )  # fmt: skip


def test_argparse_and_the_record_have_the_same_defaults() -> None:
    assert parsed() == RunRequest()


@pytest.mark.parametrize("arguments", [("--mode", "D"), ("--layers", "two"), ("--device", "tpu"), ("--nproc", "2")])
def test_argparse_refuses_what_a_flag_does_not_take(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(*arguments)


def test_a_field_of_request_and_configuration_has_one_type_and_one_default() -> None:
    shared = {field.name: field.default for field, _, _ in flags_of(RunRequest) if field.name in RunConfig.model_fields}
    assert set(shared) == {"preset", "train", "profile", "device", "fault", "fault_rank"}
    del shared["preset"]  # without one, the device decides
    assert shared == {name: RunConfig.model_fields[name].default for name in shared}
    requested, configured = get_type_hints(RunRequest), get_type_hints(RunConfig)
    assert {name: requested[name] for name in shared} == {name: configured[name] for name in shared}


def test_the_command_takes_every_field_of_its_request() -> None:
    fields = {field.name: field.default for field, _, _ in flags_of(GateRequest)}
    parameters = inspect.signature(gate).parameters
    found = {name: parameter.default for name, parameter in parameters.items()}
    of_output = {"quiet": False, "json": None, "junitxml": None, "html": None}
    of_command = {"program": None, "config_file": None, "context": inspect.Parameter.empty}
    assert found == fields | of_output | of_command


@pytest.mark.parametrize(
    ("options", "device", "says"),
    [
        ({"profile": "graphed"}, "cpu", "profile=graphed needs a GPU for each rank, and the device is cpu"),
        ({"profile": "graphed"}, "one_gpu", "the device is one_gpu"),
        ({"profile": "max-autotune", "overrides": ["compile.backend=eager"]}, "cpu", "needs compile.backend=inductor"),
        ({"profile": "measured", "mode": "A"}, "cpu", "profile=measured is of mode C, and the modes are A"),
        ({"profile": "graphed", "target": "my_model:build"}, "cuda", "--profile is for the gate's own block"),
    ],
)
def test_a_profile_that_cannot_run_is_refused_in_one_line(options: dict[str, Any], device: Device, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        RunRequest(**options).config(device)
    assert "\n" not in str(caught.value)
    assert RunRequest(profile="graphed", mode="all").config("cuda").profile == "graphed"


@pytest.mark.parametrize(("device", "preset"), [("cpu", "cpu_smoke"), ("cuda", "wan14b")])
def test_the_default_preset_follows_the_device(device: str, preset: str) -> None:
    found = RunRequest().config(device)
    assert (found.preset, found.device, found.fault_rank) == (preset, device, None)
