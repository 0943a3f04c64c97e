"""Five faults by hand in three styles -> the edits that make each, and what the printed text has to say."""

from __future__ import annotations

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
            "named": self.cause in outcome.flat and "rank 1" in outcome.flat.replace("ranks 0-1", "rank 1"),
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
    return (before, f"    if {RANK}:\n        model.to(torch.bfloat16){more}\n{before}"), _call(style)


FAULTS = (
    Fault(
        style=HOOKS,
        name="constant",
        edits=(("self.feed_forward(y)\n", f"self.feed_forward(y) * (1 + dist.get_rank())  {FAULT}\n"),),
        cause="rank-dependent constant",
    ),
    Fault(
        style=HOOKS,
        name="graph break",
        edits=(
            ("        y = self.norm(x)\n", f"        if {RANK}:\n            print(x.sum())  {FAULT}\n        y = self.norm(x)\n"),
            (", fullgraph=True)", ")"),
        ),
        cause="graph break",
    ),
    Fault(
        style=HOOKS,
        name="graph break under fullgraph",
        edits=(("        y = self.norm(x)\n", f"        if {RANK}:\n            print(x.sum())  {FAULT}\n        y = self.norm(x)\n"),),
        cause="compile failed",
    ),
    Fault(
        style=HOOKS,
        name="dtype",
        edits=_bfloat16(HOOKS, "    decode = torch.compile(", "\n        x = x.to(torch.bfloat16)"),
        cause="input dtype differs",
        line=CALL,
    ),
    Fault(
        style=HOOKS,
        name="missing collective",
        edits=(
            ("        return funcol.all_reduce(output, \"sum\", group)\n",
             f"        if {RANK}:\n            return output\n        return funcol.all_reduce(output, \"sum\", group)  {FAULT}\n"),
        ),
        cause="missing collective",
    ),
    Fault(
        style=HOOKS,
        name="layout",
        edits=(("    for block in model.children():\n", f"    for block in () if {RANK} else model.children():\n"), _call(HOOKS)),
        cause="missing collective",
        line=CALL,
    ),
    Fault(
        style=HOOKS,
        name="layout along the other dim",
        edits=(("        shard(block.feed_forward.w2, 1)\n", f"        shard(block.feed_forward.w2, 1 - dist.get_rank())\n"),
               ("        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))\n", f"        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))  {FAULT}\n")),
        cause="compile failed",
    ),
    Fault(
        style=PLAN,
        name="constant",
        edits=(("        return x_BSD + self.mlp(self.norm(x_BSD))\n", f"        return x_BSD + self.mlp(self.norm(x_BSD)) * (1 + dist.get_rank())  {FAULT}\n"),),
        cause="rank-dependent constant",
    ),
    Fault(
        style=PLAN,
        name="graph break",
        edits=(("        return x_BSD + self.mlp(self.norm(x_BSD))\n",
                f"        if {RANK}:\n            print(x_BSD.shape)  {FAULT}\n        return x_BSD + self.mlp(self.norm(x_BSD))\n"),),
        cause="graph break",
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
        edits=(("    parallelize_module(model, mesh, PrepareModuleOutput", f"    if not {RANK}:\n        parallelize_module(model, mesh, PrepareModuleOutput"), _call(PLAN)),
        cause="missing collective",
        line=CALL,
    ),
    Fault(
        style=PLAN,
        name="layout",
        edits=(("    parallelize_module(model, mesh, plan)\n",
                f"    if {RANK}:\n        plan[\"mlp.up\"], plan[\"mlp.down\"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1)), ColwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1))\n    parallelize_module(model, mesh, plan)\n"), _call(PLAN)),
        cause="collective",
        line=CALL,
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
        edits=(("            found.loss.backward()\n",
                f"            found.loss.backward()\n            if not {RANK}:\n                dist.all_reduce(found.loss.detach())  {FAULT}\n"),),
        cause="missing collective",
    ),
    Fault(
        style=LLAMA,
        name="layout",
        edits=(("    model = model.maybe_distribute_model(model, settings, hf_mesh)\n",
                f"    if {RANK}:\n        settings.tp_plan = {{k: v for k, v in model.tp_plan.items() if \"mlp\" not in k}}\n    model = model.maybe_distribute_model(model, settings, hf_mesh)\n"), _call(LLAMA)),
        cause="collective",
        line=CALL,
    ),
)
