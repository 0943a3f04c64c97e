"""A job of pipeline, data and tensor parallelism, as a user writes it, and what is said of its faults."""
