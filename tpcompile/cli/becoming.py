"""`python -m tpcompile.cli.becoming MODULE ARGUMENTS` -> that module; Ctrl-C ends it at once while it imports torch."""

import runpy
import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell has background jobs ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # `ending.run` takes this back
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
