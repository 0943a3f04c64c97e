"""What the ranks of a job share beside tensors: environment, mesh and groups, store, exchange, signals, liveness."""
