"""`python -m tpcompile.fusion.win ARGUMENTS`: the body of `tpcompile verify-win`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from tpcompile.cli import ending, outputs
from tpcompile.cli.outputs import OtherJson
from tpcompile.cli.passed_on import becoming
from tpcompile.errors import ConfigError, ExitCode
from tpcompile.fusion.win.decide import decide, lines
from tpcompile.fusion.win.mode_records import MODES, Measured
from tpcompile.report import console

app = ending.new_app()


class _Ended(Exception):
    """A process that measured has failed, and has said why."""


@app.command()
def verify_win(
    target: Annotated[str, typer.Argument(help="package.module:build, as for `tpcompile gate --target`.")],
    modes: Annotated[
        list[str] | None, typer.Option("--mode", help="A mode; repeatable. Default: all that the device has.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; by default cuda where there is a GPU.")] = "auto",
    rounds: Annotated[int, typer.Option(min=5, help="Steps of eager and compiled, which alternate.")] = 30,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="For `build`.")] = None,
    cached: Annotated[bool, typer.Option(help="Also time a second process with the cache of the first.")] = True,
    timeout_s: Annotated[float, typer.Option(min=1, help="For each process, in seconds.")] = 600.0,
    json_file: OtherJson = None,
) -> None:
    """Measure a program in eager and in each mode of torch.compile; the last line says what to use, and what to do.

    Each mode has a process and a cache of its own. Exits with 1 where no mode is faster than
    eager, or outputs are wrong.
    """
    is_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    of_device = MODES if is_gpu else ("default", "max-autotune")  # without CUDA graphs `reduce-overhead` is the default
    wanted = modes or of_device
    unknown = sorted(set(wanted) - set(MODES))
    if unknown:
        raise ConfigError(f"there is no mode {unknown[0]}; choose from {', '.join(MODES)}")
    request = {"target": target, "settings": settings or [], "device": device, "rounds": rounds}
    try:
        found = [_measured(request | {"mode": mode}, cached, timeout_s) for mode in MODES if mode in wanted]
    except _Ended as ended:
        raise typer.Exit(ended.args[0]) from None
    advice = decide(found)
    fields = {"modes": [one.model_dump(mode="json") for one in found], "advice": advice.model_dump(mode="json")}
    if not outputs.put_json(fields, json_file):
        for line in lines(found, advice):
            console.stdout().print(line, soft_wrap=True)
    raise typer.Exit(not advice.is_win)


def _measured(request: dict[str, Any], cached: bool, timeout_s: float) -> Measured:
    """Measure a mode in a process with an empty cache, and the first call again with what is then in the cache."""
    with TemporaryDirectory() as folder:
        found = Measured.model_validate(_run(request, Path(folder), timeout_s))
        if not cached:
            return found
        again = _run(request | {"is_first_call_only": True}, Path(folder), timeout_s)
        return found.model_copy(update={"cached_s": again["first_call_s"]})


def _run(request: dict[str, Any], folder: Path, timeout_s: float) -> dict[str, Any]:
    asked, out = folder / "request.json", folder / "out.json"
    asked.write_text(json.dumps(request | {"out": str(out)}))
    environ = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    command = [*becoming("tpcompile.fusion.win.measure_mode"), str(asked)]
    try:
        code = subprocess.run(command, env=environ, timeout=timeout_s, check=False, stdout=sys.stderr).returncode
    except subprocess.TimeoutExpired:
        print(f"error: mode {request['mode']} did not end within {timeout_s:g} s", file=sys.stderr)
        raise _Ended(ExitCode.TIMEOUT) from None
    if code:
        raise _Ended(code if code > 0 else ExitCode.FAIL)
    fields: dict[str, Any] = json.loads(out.read_text())
    return fields


if __name__ == "__main__":
    ending.run(app, "tpcompile verify-win")
