"""Every private or moving name of torch that tpcompile uses, by subject, with the versions it was seen on.

compiler.py   Dynamo, Inductor and the structured trace, as capture reads them
hooks.py      what Dynamo calls around a compile and after a guard lookup
watching.py   calls of compiled code, groups and the flight recorder, as the sentinel sees them
c10d.py       groups, and collectives as the eager wrappers issue them
dispatch.py   modes that see every op; simulated.py all ranks in one process
backends.py   backends and autotuning that the programs of tpcompile.faults wrap; forked.py what a forked rank sets anew

Each has a test in tests/torch_api that fails when torch moves one of its names.
"""
