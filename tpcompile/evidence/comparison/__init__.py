"""Digests of all ranks -> divergences, each with its cause, its ranks and the user's line."""
