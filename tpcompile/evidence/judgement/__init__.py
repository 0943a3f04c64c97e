"""Divergences and counted facts of a run -> checks -> `Verdict`."""
