"""What is known about a run: pure functions over frozen records, JSON on disk, no torch."""
