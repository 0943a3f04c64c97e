"""The launcher's variables -> what this process is on its node."""

from __future__ import annotations

import os


def is_first_here() -> bool:
    """True for the first rank of this node, which writes what the node has once."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def ranks_here(rank: int) -> range:
    """The ranks that the launcher has started on the node of this one; this one alone where it does not say."""
    first = rank - int(os.environ.get("LOCAL_RANK", "0"))
    return range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def has_agent() -> bool:
    """True where torchrun's agent serves the job's store, which then outlives each rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def has_other_nodes() -> bool:
    """True where the launcher has started ranks of the job on other nodes, too, and says so."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) not in (0, int(os.environ.get("WORLD_SIZE", "0")))
