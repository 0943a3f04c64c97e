"""What is known about a run, as frozen records: torch-free, JSON in, JSON out.

A `RankRecord` is everything one rank knows about itself. A `RankDigest` is the same thing hashed, small enough to
travel. `Divergence`, `Check` and `Verdict` are what is concluded from the digests of all ranks.
"""

from tpcompile.evidence.records.base import SCHEMA_VERSION, Frozen, Item, ItemKind, Layer, Status, UserLine, value_item
from tpcompile.evidence.records.compile import (
    Collective,
    CompileRecord,
    Graph,
    GraphBreak,
    Guard,
    InputTensor,
    Kernel,
    LaunchedGraph,
    Node,
    Normalised,
    PhaseCounters,
    RankRead,
    RankRecord,
    Recompile,
    RegionCount,
    SkippedFrame,
    TaintKind,
)
from tpcompile.evidence.records.digest import CompileDigest, EnteredRegion, LayerDigest, RankDigest, SplitCall
from tpcompile.evidence.records.findings import (
    Divergence,
    DivergenceClass,
    Grade,
    RankGroup,
    RecompileCause,
    Taint,
    items_of,
    ranks_of,
)
from tpcompile.evidence.records.verdict import Check, CheckId, Lead, Verdict

__all__ = [
    "SCHEMA_VERSION",
    "Check",
    "CheckId",
    "Collective",
    "CompileDigest",
    "CompileRecord",
    "Divergence",
    "DivergenceClass",
    "EnteredRegion",
    "Frozen",
    "Grade",
    "Graph",
    "GraphBreak",
    "Guard",
    "InputTensor",
    "Item",
    "ItemKind",
    "Kernel",
    "LaunchedGraph",
    "Layer",
    "LayerDigest",
    "Lead",
    "Node",
    "Normalised",
    "PhaseCounters",
    "RankDigest",
    "RankGroup",
    "RankRead",
    "RankRecord",
    "Recompile",
    "RecompileCause",
    "RegionCount",
    "SkippedFrame",
    "SplitCall",
    "Status",
    "Taint",
    "TaintKind",
    "UserLine",
    "Verdict",
    "items_of",
    "ranks_of",
    "value_item",
]
