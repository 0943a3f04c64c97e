"""This machine -> what of it keeps tpcompile or torch.compile from working, with what to do; without torch.

finding.py     one line of the report
examine.py     all of them, in the order of the report
host.py        what the operating system knows: Python, compiler, shared memory, addresses, ports
caches.py      where the compilers write
variables.py   environment variables that change compilation or communication
torch_says.py  torch, asked in a child process, which may hang (`preflight.machine`)
known.py       versions with a known problem, from known.toml
"""
