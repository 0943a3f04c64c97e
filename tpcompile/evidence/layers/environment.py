"""Versions, environment variables and settings of a rank -> one item each; of the rank, not of a compile."""

from __future__ import annotations

from tpcompile.evidence.groups.by_group import Row
from tpcompile.evidence.layers import process_settings as state
from tpcompile.evidence.layers.spec import Difference, Directness, Explanation, Followed, LayerSpec
from tpcompile.evidence.records import value_item
from tpcompile.evidence.records.causes import Cause

SOURCE_OF = "source of "
"""Start of the item that has the hash of a fused kernel's source."""
COMPILED_WITH = "compiled with"
"""The item that names the passes and backends that others than torch made."""
KERNEL_OF = "kernel of "
"""Start of the item of a kernel that others registered for an op of torch."""


def _explain(difference: Difference) -> Explanation:
    """A setting that torch guards has the same cause as a failed guard on it."""
    row = difference.rows[0]
    found = state.cause_of(row.first.about)
    cause = Cause.ENVIRONMENT if found == Cause.PROCESS_STATE else found
    return Explanation(cause, Directness.STATE, row)


def _uncalled(difference: Difference) -> Followed:
    """A kernel that some ranks do not call has no source there: what differs is the program, which has a finding.

    So has a rank that compiled nothing.
    """
    left: list[Row] = []
    uncalled: list[Row] = []
    for row in difference.rows:
        about = row.first.about
        is_of_kernel = about.startswith((SOURCE_OF, COMPILED_WITH))
        if is_of_kernel and not row.is_full:
            uncalled.append(row)
        else:
            left.append(row)
    return Followed(left, uncalled, "a fused kernel that some ranks do not call")


SPEC = LayerSpec(
    explain=_explain,
    of_rank=lambda record: [value_item(name, value) for name, value in sorted(record.environment)],
    follow=_uncalled,
    is_ordered=False,
)
