"""A command line -> exit code: the only place that prints an error and ends the process."""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import typer

from tpcompile.cli.outputs import with_stdout
from tpcompile.errors import REFUSED_BY_MACHINE, ExitCode, TargetRaised, TpCompileError
from tpcompile.report.stdout import forgiving, open_missing


def new_app(**options: Any) -> typer.Typer:
    """An app for `run` with the help of `tpcompile`, in a process that a command becomes."""
    help_names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=help_names,
        **options,
    )


def run(app: typer.Typer, name: str) -> None:
    """Run the command that the process was given; ends it with a code of `tpcompile.errors.ExitCode`."""
    code = ExitCode.BUG
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    open_missing()
    try:
        app(with_stdout(sys.argv[1:]), prog_name=name)
    except SystemExit as ending:
        cause = ending.__context__
        is_closed_pipe = isinstance(cause, OSError) and cause.errno == errno.EPIPE
        if not is_closed_pipe:
            raise
        code = ExitCode.PASS  # click would exit with 1, although `tpcompile presets | head` has shown its lines
    except TpCompileError as error:
        if isinstance(error, TargetRaised):
            traceback.print_exception(error.__cause__)
        from tpcompile.report.wording import plain  # of no use to a command that ends well, such as --help

        print(f"error: {plain(str(error))}", file=sys.stderr)
        code = error.exit_code
    except Exception as error:
        code = _of_exception(error)
    finally:
        with forgiving():
            sys.stdout.flush()
    sys.exit(code)


def run_and_leave(app: typer.Typer, name: str) -> NoReturn:
    """As `run`, and leave the process without taking apart what it imported: for torch that takes 1 s.

    What is registered with `atexit` runs. For a command without threads or a process group of its own.
    """
    code: Any = ExitCode.BUG
    try:
        run(app, name)
    except SystemExit as ending:
        code = ending.code or ExitCode.PASS
        if not isinstance(code, int):  # a program may leave with a text, which the interpreter would print
            print(code, file=sys.stderr)
            code = ExitCode.FAIL
    atexit._run_exitfuncs()
    with forgiving():
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _of_exception(error: Exception) -> ExitCode:
    if isinstance(error, OSError) and error.errno in REFUSED_BY_MACHINE:
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}", file=sys.stderr)
        return ExitCode.ENVIRONMENT
    traceback.print_exception(error)
    print("error: this is a bug in tpcompile; please report it with the lines above", file=sys.stderr)
    return ExitCode.BUG
