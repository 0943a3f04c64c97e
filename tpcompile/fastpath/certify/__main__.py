"""`python -m tpcompile.fastpath.certify NAME`: the body of `tpcompile certify`, in a process that imports torch."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
import typer

from tpcompile import logs
from tpcompile.cli import ending
from tpcompile.errors import ConfigError

app = ending.new_app()
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@app.command()
def certify(
    name: Annotated[str, typer.Argument(help="Name of the fast path.")],
    module: Annotated[
        str, typer.Option("--import", metavar="MODULE", help="Python module that declares the fast path and its cases.")
    ],
    tp: Annotated[
        str, typer.Option("--tp", metavar="SIZES", help="Numbers of ranks; one device is enough for all.")
    ] = "2,1,4,8",
    jobs: Annotated[int, typer.Option(min=1, help="Mutations to run in parallel.")] = os.cpu_count() or 1,
    mutations: Annotated[
        int | None, typer.Option(min=1, help="Run this many mutations, evenly spread, and write no certificate.")
    ] = None,
    more_cases: Annotated[
        bool,
        typer.Option(
            "--more-cases",
            help="For cases that were added, with none changed: run only the mutations that no case caught.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only print whether the fast path is certified for this source.")
    ] = False,
) -> None:
    """Run a fast path on shards against its plain code on one device in float64, and write its certificate.

    Without a GPU, kernels run in Triton's interpreter. With one, they run in the interpreter first unless there is a
    certificate of it for this source, since mutations run there only.
    """
    logs.setup(rank=0, verbose=True)
    sizes = _sizes(tp)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is declared
    with _users_modules():
        importlib.import_module(module)
    from tpcompile.fastpath import certificate
    from tpcompile.fastpath.certify import certify as prove
    from tpcompile.fastpath.certify.proof import find

    path = find(name)
    if check:
        why = certificate.uncertified(path)
        print(why or f"{path}: certified")
        raise typer.Exit(bool(why))
    if torch.cuda.is_available() and certificate.power_of(path) is None:
        subprocess.run([sys.executable, "-m", "tpcompile.fastpath.certify", *sys.argv[1:]], env=os.environ | _NO_GPU)
    proved = prove(
        name,
        tp_sizes=sizes,
        jobs=jobs,
        num_mutations=mutations,
        is_for_more_cases=more_cases,
        command=" ".join(["tpcompile", "certify", *sys.argv[1:]]),
    )
    print(proved, *(f"  {survivor}" for survivor in proved.power.survivors), sep="\n")
    why = proved.refusal(path.source.sha256)
    if why:
        print(f"not certified: {why}")
    elif mutations is None:
        print(f"written: {certificate.write(proved, path)}")
    raise typer.Exit(bool(why))


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(size) for size in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"--tp {text!r}: pass numbers of ranks, as in --tp 1,2,4,8")
    return sizes


@contextmanager
def _users_modules() -> Iterator[None]:
    """Modules of the current folder can be imported; a module that does not exist is a usage error."""
    sys.path.insert(0, "")
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"--import: {error}; pass the name of a module that Python finds from here") from error


if __name__ == "__main__":
    ending.run(app, "tpcompile certify")
