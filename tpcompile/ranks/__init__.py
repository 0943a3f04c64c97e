"""What the ranks of a job share besides tensors: environment, mesh and groups, store, exchange, signals, liveness.

env.py        torchrun's environment variables -> rank, device, process group
store.py      JSON between ranks through the c10d store
answered.py   what asks the store -> its result, or the reason in time where the store is silent
run_dir.py    this rank's own path -> the run directory of all ranks
store_process.py  the job's store where no torchrun agent serves one
exchange.py   a digest from every rank -> one verdict on all ranks
packed.py     long texts and verdicts as they are sent
agree.py      what each rank brings -> what one of them settled: the first value wins
recorded.py   the record of a rank -> its side of an exchange
domain.py     a mesh and one of its axes -> the ranks that must compile the same programs; names of its groups
groups.py     any spelling of a group -> its ProcessGroup, and its subgroups of consecutive ranks
per_group.py  values that live as long as a ProcessGroup
processes.py  whether the process of a rank has ended, as the store knows it
liveness.py   pid and host of a rank -> state of its process
signals.py    SIGTERM -> a pipe that a thread reads
pool.py       the one way to start N ranks: a function -> its result on each; forked or spawned
children.py   calls -> how each ended, in a forked process of its own that is no rank
"""
