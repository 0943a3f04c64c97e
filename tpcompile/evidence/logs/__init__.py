"""TORCH_TRACE files of a job -> verdict, offline: find the logs, read them, say how far they go."""
