"""Five faults by hand in three styles -> the edits that make each, and what the printed text has to say."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.adapters.programs import ADAPTERS, Adapter, Outcome

FAULT, CALL = "# the fault", "# the call"
RANK = "dist.get_rank() == 1"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A program in which rank 1 deviates."""

    style: str
    name: str
    edits: tuple[tuple[str, str], ...]
    cause: str
    """Phrase of the verdict."""
    ranks: str = r"rank 1|ranks 0-1 differ"
    """Pattern of what names the ranks."""
    line: str = FAULT
    """Comment of the line that must be named: that of the call where the fault is in what goes into the region."""

    @property
    def adapter(self) -> Adapter:
        """The program."""
        return ADAPTERS[self.style]

    def judge(self, outcome: Outcome) -> dict[str, bool]:
        """Was it found without a hang, and do cause, rank and line stand in the text?"""
        number = outcome.line_of(self.line)
        return {
            "found": outcome.returncode != 124 and "FAIL" in outcome.text,
            "named": self.cause in outcome.flat and re.search(self.ranks, outcome.flat) is not None,
            "line": f"{self.adapter.program}.py:{number}" in outcome.flat,
        }


_CALLS = {
    "hooks, as gpt-fast": "found = decode(x)",
    "DTensor plan, sequence parallel": "found = compiled(ids)",
    "transformers Llama": "found = compiled(input_ids=ids, labels=ids, use_cache=False)",
}
HOOKS, PLAN, LLAMA = _CALLS


def _call(style: str) -> tuple[str, str]:
    return _CALLS[style] + "\n", f"{_CALLS[style]}  {CALL}\n"


def _hooked(body: str) -> tuple[str, str]:
    """A user's forward hook on the last layer of Llama."""
    before = "    compiled = torch.compile(model"
    hook = f"    def hook(module, inputs, output):\n{body}        return output\n\n"
    return before, f"{hook}    model.model.layers[-1].register_forward_hook(hook)\n{before}"


def _bfloat16(style: str, before: str, more: str = "") -> tuple[tuple[str, str], ...]:
    more = f"        {more}\n" if more else ""
    return (before, f"    if {RANK}:\n        model.to(torch.bfloat16)\n{more}{before}"), _call(style)


_MLP = "self.feed_forward(y)\n"
_NORM = "        y = self.norm(x)\n"
_REDUCE = '        return funcol.all_reduce(output, "sum", group)\n'
_SWIGLU = "        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))\n"
_HEAD = "        return self.head(x_BSD + self.mlp(self.norm(x_BSD)))\n"
_PLANNED = "    parallelize_module(model, mesh, plan, src_data_rank=None)  # all ranks made the same weights\n"


_RELU = "        return self.down(torch.relu(self.up(x_BSD)))\n"
_BUILT = '    model = getattr(transformers, f"{family}ForCausalLM")(config)\n'
_OTHER_DIM = (
    f'    if {RANK}:\n        plan["mlp.up"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))\n'
)


def _printing(before: str) -> tuple[str, str]:
    return before, f"        if {RANK}:\n            print(self.norm.weight.shape)  {FAULT}\n{before}"


FAULTS = (
    Fault(
        style=HOOKS,
        name="constant",
        edits=((_MLP, f"self.feed_forward(y) * (1 + dist.get_rank())  {FAULT}\n"),),
        cause="rank-dependent constant",
    ),
    Fault(
        style=HOOKS,
        name="graph break",
        edits=(_printing(_NORM), (", fullgraph=True)", ")")),
        cause="graph break",
        ranks="on rank 1 only",
    ),
    Fault(
        style=HOOKS,
        name="graph break under fullgraph",
        edits=(_printing(_NORM),),
        cause="compile failed",
        ranks=r"\(rank 1\)",
    ),
    Fault(
        style=HOOKS,
        name="dtype",
        edits=_bfloat16(HOOKS, "    decode = torch.compile(", "x = x.to(torch.bfloat16)"),
        cause="input dtype differs",
        line=CALL,
    ),
    Fault(
        style=HOOKS,
        name="missing collective",
        edits=((_REDUCE, f"        if {RANK}:\n            return output\n{_REDUCE[:-1]}  {FAULT}\n"),),
        cause="extra or missing collective",
        ranks="on rank 0 only",
    ),
    Fault(
        style=HOOKS,
        name="layout: not sharded",
        edits=(("in model.children():\n", f"in () if {RANK} else model.children():\n"), _call(HOOKS)),
        cause="input shape differs",
        line=CALL,
    ),
    Fault(
        style=HOOKS,
        name="layout: along the other dim",
        edits=(
            ("shard(block.feed_forward.w2, 1)", "shard(block.feed_forward.w2, 1 - dist.get_rank())"),
            (_SWIGLU, f"{_SWIGLU[:-1]}  {FAULT}\n"),
        ),
        cause="compile failed",
        ranks=r"\(rank 1\)",
    ),
    Fault(
        style=PLAN,
        name="constant",
        edits=((_HEAD, _HEAD.replace("self.mlp", "(1 + dist.get_rank()) * self.mlp")[:-1] + f"  {FAULT}\n"),),
        cause="rank-dependent constant",
    ),
    Fault(
        style=PLAN,
        name="graph break",
        edits=(_printing(_HEAD),),
        cause="graph break",
        ranks="on rank 1 only",
    ),
    Fault(
        style=PLAN,
        name="dtype",
        edits=_bfloat16(PLAN, "    compiled = torch.compile("),
        cause="input dtype differs",
        line=CALL,
    ),
    Fault(
        style=PLAN,
        name="missing collective",
        edits=(
            (_PLANNED, f'    if {RANK}:\n        plan["head"] = ColwiseParallel(input_layouts=Shard(1))\n{_PLANNED}'),
            (_HEAD, f"{_HEAD[:-1]}  {FAULT}\n"),
        ),
        cause="extra or missing collective",
        ranks="on rank 0 only",
    ),
    Fault(
        style=PLAN,
        name="layout: along the other dim",
        edits=((_PLANNED, f"{_OTHER_DIM}{_PLANNED}"), (_RELU, f"{_RELU[:-1]}  {FAULT}\n")),
        cause="extra or missing collective",
        ranks="on rank 1 only",
    ),
    Fault(
        style=PLAN,
        name="layout: in the setup, which is watched too",
        edits=(
            (
                _PLANNED,
                f"{_OTHER_DIM}    with tpcompile.capture(mesh):\n"
                f"        parallelize_module(model, mesh, plan)  {FAULT}\n",
            ),
        ),
        cause="stuck in a collective",
    ),
    Fault(
        style=LLAMA,
        name="constant",
        edits=(_hooked(f"        output = output * (1 + dist.get_rank())  {FAULT}\n"),),
        cause="rank-dependent constant",
    ),
    Fault(
        style=LLAMA,
        name="graph break",
        edits=(_hooked(f"        if {RANK}:\n            print(output.shape)  {FAULT}\n"),),
        cause="graph break",
        ranks="on rank 1 only",
    ),
    Fault(
        style=LLAMA,
        name="dtype",
        edits=_bfloat16(LLAMA, "    compiled = torch.compile("),
        cause="input dtype differs",
        line=CALL,
    ),
    Fault(
        style=LLAMA,
        name="missing collective",
        edits=(
            (
                "            found.loss.backward()\n",
                f"            found.loss.backward()\n            if not {RANK}:\n"
                f"                dist.all_reduce(found.loss.detach())  {FAULT}\n",
            ),
        ),
        cause="stuck in a collective",
        ranks=r"\(ranks 0-1\)",
    ),
    Fault(
        style=LLAMA,
        name="layout: a different plan",
        edits=(
            (
                _BUILT,
                f"    if {RANK}:\n        plan = config.base_model_tp_plan\n        config.base_model_tp_plan = "
                f'{{name: plan[name] for name in plan if "mlp" not in name}}\n{_BUILT}',
            ),
            _call(LLAMA),
        ),
        cause="extra or missing collective",
        ranks="on rank 0 only",
        line=CALL,
    ),
)
