"""Name of what is wrong -> its rule, and the text of its reason and its advice; the only place with sentences.

A text is a format of facts that the rule found. `op` is the op or wrapper, `world` the number of ranks and `rank` this
one in every text; `x.origin.made` is `, made by OP at FILE:LINE`, or empty where that is not known.
"""

from __future__ import annotations

from typing import NamedTuple


class Wording(NamedTuple):
    """One way to break a rule."""

    rule: str
    """Name of the rule, e.g. `bias-before-reduce`; several wordings may have the same."""
    why: str
    """The effect on values or gradients."""
    fix: str
    """What to do."""


# Partial and local values used as if they were whole.
PARTIAL_USED = Wording(
    "partial-used-as-whole",
    "{op} {what} and reads a partial sum (P{x.origin.made}): every rank has only its own summand",
    "all_reduce (or reduce_scatter) the partial sum before this op",
)
STATISTIC_USED = Wording(
    "local-statistic",
    "{op} reads a {x.op} over the sharded dim{x.origin.made}: a statistic of the local shard only",
    "make the statistic global first: all-reduce the sum (dst='R') and divide by the global count, or all-reduce with "
    "the matching op",
)
LOCAL_MAXIMUM = Wording(
    "local-statistic",
    "{op} subtracts a {x.op} over the sharded dim{x.origin.made}: a statistic of the local shard only",
    "all-reduce the maximum first; or multiply by exp(local - global maximum) before the sum over the ranks",
)
LOCAL_MEAN = Wording(
    "local-statistic",
    LOCAL_MAXIMUM.why,
    "make the mean global first: all-reduce the sum (dst='R') and divide by the global count; or add to the sum of "
    "squares those of the gathered means around the global one",
)
LOCAL_NORM = Wording(
    "local-statistic",
    "{op} {what} over dim {x.dim}, which is sharded: every rank normalises over its own shard only",
    "use the distributed form: all-reduce the local sums (dst='R') and divide by the global count, and for a softmax "
    "all-reduce the maximum first",
)
LOCAL_KEYS = Wording(
    "local-statistic",
    "{op} attends to keys that are sharded over tokens: every query sees this rank's tokens only",
    "all_gather keys and values along the tokens; or merge the ranks' results by their log-sum-exp",
)
RESULT_DROPPED = Wording(
    "result-dropped",
    "the result of this collective is not used: the op is out of place and leaves its input unchanged",
    "use what it returns: x = {op}(x, ...)",
)

# Outputs.
RETURNED_PARTIAL = Wording(
    "partial-used-as-whole",
    "the module returns a partial {x.op} ({x}): every rank has only its own part",
    "all_reduce (or reduce_scatter) it before it is returned, or declare the output as P",
)
RETURNED_STATISTIC = RETURNED_PARTIAL._replace(rule="local-statistic")
RETURNED_R = Wording(
    "needs-dst-I",
    "the module returns R where I is declared: the caller's work is the same on all ranks, so a gradient that is "
    "summed over the ranks is counted once per rank",
    "give the last collective dst='I', or declare the output as R",
)
RETURNED_SHARD = Wording(
    "sharded-output",
    "the module returns what differs per rank ({x}) where I is declared",
    "all_gather it with dst='I', or declare the output as V",
)

# Positions and layouts.
LOCAL_DIAGONAL = Wording(
    "local-positions",
    "{op} takes the diagonal of the local block, and dim {x.dim} is sharded: on rank {rank} it begins elsewhere",
    "compare global positions, which begin at rank_index * local length",
)
LOCAL_NUMBERS = Wording(
    "local-positions",
    "{op} reads positions that count from 0 on every rank beside a shard of the same dim: on rank {rank} it begins "
    "elsewhere",
    "count from the rank's first place: torch.arange(n) + rank_index * n",
)
LOCAL_CAUSAL_MASK = Wording(
    "local-positions",
    "queries are sharded over tokens and keys are whole: is_causal takes the first query of every rank for token 0",
    "pass a mask made from global positions: key position <= query position + rank_index * local length",
)
RUNNING = Wording(
    "crosses-shards",
    "{op} runs along dim {x.dim}, which is sharded: it starts again on every rank",
    "add what the ranks before have in total: all_gather the totals, sum those of lower ranks; or gather first",
)
CROSSES = Wording(
    "crosses-shards",
    "{op} moves or mixes elements along dim {x.dim}, which is sharded: those of other ranks are missing",
    "exchange the elements at the border with the neighbouring ranks, or all_gather along the dim first",
)
MIXED_SHARDS = Wording(
    "mixed-shards",
    "the operands are shards of different dims ({dims}, counted on the result): every rank computes a block of its "
    "own, and the other blocks of the whole result are computed nowhere",
    "bring both into one layout first: all_gather one of them",
)

# Gradients.
UNDECLARED = Wording(
    "undeclared-layout",
    "{x.origin} is used in work that differs per rank, and no layout is declared for it, so it is taken for replicated",
    "if each rank holds a shard of it, declare that: in shard_specs() of its module, or "
    "parameter_types={{'NAME': 'V(0)'}}; if it is the same on all ranks, pass it through copy_to_tp first",
)
NEEDS_R = Wording(
    "needs-dst-R",
    "the result of {x.origin} is read by work that differs per rank, so its gradient is different on each rank and is "
    "not summed",
    "reduce it with dst='R' (all-reduce of the gradient), or pass it through copy_to_tp where only here the work "
    "differs per rank",
)
NEEDS_I = Wording(
    "needs-dst-I",
    "the result of {x.origin} has a gradient that is summed over the ranks, but it is combined with a replicated "
    "tensor (I) in work that all ranks repeat: its gradient is counted once per rank",
    "give the collective dst='I'; or, where the work behind it does differ per rank, pass the replicated tensor "
    "through copy_to_tp",
)
MISSING_COPY = Wording(
    "missing-copy",
    "a replicated tensor (I) is read by work that differs per rank, so its gradient stays partial on each rank",
    "pass the replicated tensor through copy_to_tp first: identity forward, all-reduce of the gradient",
)
MISSING_COPY_BESIDE_R = Wording(
    "missing-copy",
    "a tensor inside the parallel region (R, partial gradient) is combined with a replicated tensor (I) that never "
    "entered it: one of the two gradients is wrong",
    "pass the replicated tensor through copy_to_tp as well",
)
MISSING_COPY_OF_REPLICAS = Wording(
    "missing-copy",
    "{op} reads rows that neighbouring ranks hold too (replicas, as of a kv head): each of these ranks has a part of "
    "their gradient, and nothing adds the parts up",
    "pass these rows through copy_to_tp over the ranks that share them: comm.replicas(n).copy_to_tp(rows)",
)
FUNCTION_GRADIENT = Wording(
    "function-gradient",
    "the backward of {op} does not give its inputs the gradient of their types, whether the gradient of its result is "
    "equal on all ranks or partial",
    "where the forward leaves a replicated tensor as it is, all-reduce the gradient in the backward; where the forward "
    "reduces, return the gradient as it is; where it gathers, return this rank's part",
)
DOUBLE_COPY = Wording(
    "double-copy",
    "copy_to_tp of {x}{x.origin.made}, which is inside the parallel region already: its backward {effect}",
    "call copy_to_tp once per replicated tensor, where it enters the region",
)
WRONG_SRC = Wording(
    "wrong-src",
    "scatter of {x} with src={src!r}: the gradient of {x} is {effect}",
    "pass src={x.kind!r}",
)
NO_STATED_GRADIENT = Wording(
    "no-stated-gradient",
    "{op} writes in place: eager autograd does not see it, and torch.compile rewrites it to an op whose backward "
    "all-reduces, so the gradient differs by a factor of {world} between the two",
    "use tpcompile.collectives, which state the gradient: e.g. all_reduce(x, group=..., dst='I')",
)
CUT_BY_COLLECTIVE = Wording(
    "gradient-cut",
    "no gradient goes through this collective (no_grad, or a detached operand), and {names} reaches the outputs "
    "through it alone: it never gets a gradient",
    "reduce with a stated gradient: all_reduce(x, group=..., dst='I') outside of no_grad; for inference check with "
    "train=False",
)
CUT_BY_OP = Wording(
    "gradient-cut",
    CUT_BY_COLLECTIVE.why.replace("collective", "op"),
    "call it outside of no_grad and without detach; freeze a parameter that is not to be trained: "
    "requires_grad_(False); for inference check with train=False",
)

# Reduces and gathers.
DOUBLE_REDUCE = Wording(
    "double-reduce",
    "the operand is {x}, whole on every rank{x.origin.made}: a second reduce multiplies it by {world}",
    "reduce a partial sum once",
)
SHARDS_ADDED = Wording(
    "shards-added",
    "the operand is a shard ({x}): a sum over the ranks adds up elements of different places",
    "all_gather the shard; or reduce the partial result of the op that contracts the sharded dim",
)
LOOKUP_ADDED = Wording(
    "lookup-without-mask",
    "the operand is what each rank found in its own shard: of a number that is another rank's it found something else, "
    "and a sum over the ranks adds that",
    "before the sum, put zeros where the number is not this rank's: x.masked_fill(~is_own, 0)",
)
WRONG_REDUCE_OP = Wording(
    "wrong-reduce-op",
    "the operand is a partial {x.op}, reduced with {given!r}",
    "{advice}",
)
SUM_OF_MEANS = Wording(
    "wrong-reduce-op",
    "the result is a sum of local means: {world} times the mean",
    "reduce it with op='avg', or divide it by the number of ranks before it is used",
)
AVERAGE_OF_SUMS = Wording(
    "wrong-reduce-op",
    "the result is an average of partial sums: 1 / {world} of the sum",
    "reduce it with op='sum', or multiply it by the number of ranks before it is used",
)
DOUBLE_GATHER = Wording(
    "double-gather",
    "all_gather of {x}, which is whole on every rank{x.origin.made}: the result has {world} copies",
    "leave the gather out, or gather the shard",
)
WRONG_GATHER_DIM = Wording(
    "wrong-gather-dim",
    "the operand is sharded on dim {x.dim}, and all_gather joins the shards along dim {dim}",
    "gather along dim {x.dim}",
)
PARTIAL_GATHERED = Wording(
    "partial-used-as-whole",
    "all_gather puts partial values (P{x.origin.made}) side by side: every block is the summand of one rank",
    "all_reduce a partial sum, or reduce_scatter it",
)

# Replicated tensors in a sum over the ranks.
COUNTED = Wording(
    "bias-before-reduce",
    "{term}{times} {added}: a sum over the ranks counts it {count}, and without one each rank continues with a "
    "different sum",
    "{fix}",
)
ON_SOME_RANKS_I = Wording(
    "on-some-ranks",
    "{term} {added} on some ranks and not on others: they alone get a gradient of it",
    "all_reduce the partial sum first, then add on every rank; or add on every rank "
    "torch.where(rank_index == 0, copy_to_tp(x), 0)",
)
ON_SOME_RANKS_R = ON_SOME_RANKS_I._replace(
    why="{term} {added} on some ranks and not on others: in the backward its copy_to_tp waits there for ranks that do "
    "not come"
)
SHARE_OF_I = Wording(
    "gradient-of-a-share",
    "{term} times {term.factor.value:g} {added} on each of the {world} ranks: the sum over the ranks has it {count}, "
    "but its gradient through this op is {ratio} the right one on every rank",
    "all_reduce the partial sum first, then add the whole tensor; or pass it through copy_to_tp before the division, "
    "whose backward adds up the gradients of the ranks",
)
SHARE_OF_R = SHARE_OF_I._replace(
    fix="all_reduce the partial sum first, then add the whole tensor; copy_to_tp adds up the gradients of the ranks, "
    "so each of them must be a share, as the value is"
)
