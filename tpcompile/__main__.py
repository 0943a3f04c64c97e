"""`python -m tpcompile` is `tpcompile`."""

from tpcompile.cli import main

if __name__ == "__main__":
    main()
