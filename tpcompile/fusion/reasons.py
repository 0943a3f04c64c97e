"""Inductor's reasons for not fusing two nodes -> what they mean, and what would change it.

Reasons as torch 2.11.0 and 2.13.0 log them (`TORCH_LOGS=fusion`); `tests/fusion/test_reasons.py` compares the list with
the installed torch.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import cache

from tpcompile.evidence.records.base import Frozen


class Boundary(StrEnum):
    """What keeps two launches apart."""

    COLLECTIVE = "collective"
    EXTERN = "library call"
    CUSTOM = "custom op"
    TRITON = "Triton kernel of yours"
    TEMPLATE = "matmul template"
    ORDER = "order"
    SHAPE = "shape"
    STAGES = "stages of a reduction"
    INDEXING = "indexing"
    DEVICE = "device"
    MUTATION = "in place"
    SIZE = "size limit"
    MEMORY = "peak memory"
    TIMING = "timing"
    BACKEND = "backend, silent"
    CHOICES = "choices, silent"
    NOT_TRIED = "not tried"
    UNKNOWN = "unknown reason"


class Reason(Frozen):
    """Why two nodes were not fused."""

    boundary: Boundary
    text: str
    """The reason in plain words."""
    remedy: str = ""
    """The setting or rewrite that makes one launch of them, of which tests/advice has a program; empty for none."""
    saves_nothing: bool = False
    """True where neither reads what the other has at hand, or next to nothing: one kernel would move as much."""

    @property
    def says(self) -> str:
        """On one line: `size limit: the kernel would have too many ops; try: config.max_fusion_size`."""
        remedy = f"; try: {self.remedy}" if self.remedy else ""
        return f"{self.boundary}: {self.text}{remedy}"


DIFFERENT_ORDER = Reason(
    boundary=Boundary.INDEXING,
    text="the second reads the buffer in a different order, or more of it, than the first writes",
)
NOTHING_SHARED = Reason(
    boundary=Boundary.INDEXING,
    text="they read the same buffer, but no element of it in the same order: one pass would save no read",
    saves_nothing=True,
)
TWO_ORDERS = Reason(boundary=Boundary.INDEXING, text="they read the same buffer in different orders")

_SAY: dict[Boundary, dict[str, str]] = {
    Boundary.EXTERN: {
        "node1 is extern or nop": "the first is a library call",
        "node2 is extern or nop": "the second is a library call",
        "node1 is extern but not a triton kernel": "the first is a library call",
    },
    Boundary.TRITON: {
        "node1 is extern but node2 is not SchedulerNode": "a Triton kernel of yours takes one pointwise node only",
        "node1 is extern but node2.node is not SchedulerNode": "a Triton kernel of yours takes one pointwise node only",
        "node1 is extern but node2.node.data is not Pointwise": (
            "a Triton kernel of yours takes one pointwise node only"
        ),
        "node1's triton kernel doesn't support epilogue fusion": "your Triton kernel cannot take what follows",
        "epilogue reads from buffers other than the mutated output": (
            "what follows your Triton kernel reads a second buffer"
        ),
        "node1 and node2 uses different buf layouts": "what follows your Triton kernel has a different layout",
    },
    Boundary.TEMPLATE: {
        "prologue fusion turned off": "operands are not computed in the template",
        "prologue fusion only supported for pointwise nodes": "a reduction cannot be computed in a template's operand",
        "prologue fusion only supported for TritonTemplates": "this template takes no computed operand",
        "prologue fusion not implemented for kernel for these inputs": (
            "the template takes no computed operand at this place"
        ),
        "template has no allowed prologue inputs": "the template takes no computed operand",
        "prologue fusion will not increase amount of bytes read in kernel": (
            "the template would read more than 1.1 times the bytes: several operands instead of one"
        ),
        "prologue fusion will not increase attempt to fuse in padding bc it increases unaligned reads": (
            "padding in the template would read unaligned"
        ),
        "prologue fusion that must be upcast to fp32 not profitable for low precision templates": (
            "the operand is computed in float32, the template in a lower precision"
        ),
        "template prologue can only fuse nodes with a single use": "the operand is used elsewhere too",
        "template prologue can only fuse nodes with a single use into template": "the operand is used elsewhere too",
        "template epilogue not satisfied": (
            "a reduction, or an op in place, cannot follow in the template, or config.epilogue_fusion is off"
        ),
        "multi-output template epilogue requires ComputedBuffer": (
            "the template has several outputs, and takes pointwise nodes only"
        ),
    },
    Boundary.ORDER: {
        "intermediate nodes between node1 & node2": (
            "a different launch must run between them, which reads what the first writes and feeds the second"
        ),
        "will create cycle": "one kernel would have to run before and after a different one",
        "node1 must go before node2": "the second makes an input of the first",
        "grouped node must not be fused with other nodes": "one belongs to a group of nodes that a pass keeps together",
        "candidate producer is not dep of any foreach consumer": "no element of the foreach op reads it",
        "candidate consumer has no dep in any foreach producer": "it reads no element of the foreach op",
    },
    Boundary.SHAPE: {
        "numel/rnumel mismatch (reduce) (%s, %s), (%s, %s)": "two reductions over different shapes",
        "numel/rnumel mismatch (non-reduce) (%s, %s), (%s, %s)": "they have different numbers of elements",
        "numel/rnumel mismatch prologue mismatch (%s, %s), (%s, %s)": (
            "the template's operand has a different number of elements"
        ),
        "nodes numel incompatibility": "their numbers of elements do not fit",
        "nodes numel/rnumel incompatibility": "a reduction and a pointwise node of a different shape",
        "tiling mismatch (%s, %s, %s)": "fused, the kernel would need a different tiling than each alone",
        "invalid tiling for reduction": "the reduction's tiling does not fit the other node",
        "invalid loop order and tiling for native matmul": "the loop order of the native matmul does not fit",
        "Split scan cannot fuse with reductions": "a long scan is several kernels, which take no reduction",
        "foreach do not have same length": "two foreach ops over lists of different lengths",
        "candidate producer is a reduction, foreach ops cannot be fused with reductions currently": (
            "foreach ops take no reduction"
        ),
        "candidate consumer is a reduction, foreach ops cannot be fused with reductions currently": (
            "foreach ops take no reduction"
        ),
    },
    Boundary.INDEXING: {
        "no shared data due to indexing mismatch": "they use the same buffer with different indices",
    },
    Boundary.DEVICE: {
        "device mismatch (%s vs %s)": "they run on different devices",
    },
    Boundary.MUTATION: {
        "fusion for buffer explicit disabled": (
            "a pass of Inductor forbids fusion of this buffer (no_fuse_buffer_names)"
        ),
        "template prologue can only fuse functional pointwise nodes": "the operand is written in place",
    },
    Boundary.SIZE: {
        "fusion_prevent_too_many_reads_and_writes": "the kernel would read and write too many buffers",
    },
    Boundary.MEMORY: {
        "Fusion will increase peak memory": "a buffer would have to live longer, and peak memory would grow",
        "Nodes are too far away. Fusing them may increase peak memory.": (
            "they are far from each other in the program: fused, a buffer would live longer"
        ),
    },
    Boundary.TIMING: {
        "register spilling of the first kernel": "the first kernel spills registers",
        "register spilling of the second kernel": "the second kernel spills registers",
        "register spilling of the fused kernel": "fused, the kernel would spill registers",
    },
    Boundary.UNKNOWN: {
        "node1 is nop": "the first does nothing",
    },
}
"""What keeps two launches apart -> what Inductor logs, `%s` for its numbers, and what that means."""
_KNOWN: dict[str, Reason] = {
    "memory deps did not match": DIFFERENT_ORDER,
    "no shared data": NOTHING_SHARED,
    "score_fusion_memory_threshold": Reason(
        boundary=Boundary.SIZE,
        text="they share too few bytes",
        remedy="config.score_fusion_memory_threshold = 0 (10 bytes by default)",
        saves_nothing=True,
    ),
    "exceeds max fusion": Reason(
        boundary=Boundary.SIZE, text="the kernel would hold too many nodes", remedy="config.max_fusion_size (64)"
    ),
}
for _boundary, _meanings in _SAY.items():
    _KNOWN |= {logged: Reason(boundary=_boundary, text=text) for logged, text in _meanings.items()}


def reason_of(logged: str) -> Reason:
    """What a logged reason means; the text itself where it is not known."""
    for pattern, reason in _patterns():
        if pattern.fullmatch(logged):
            return reason
    return Reason(boundary=Boundary.UNKNOWN, text=f"Inductor says: {logged}")


@cache
def _patterns() -> list[tuple[re.Pattern[str], Reason]]:
    return [(re.compile(".*".join(map(re.escape, text.split("%s")))), reason) for text, reason in _KNOWN.items()]
