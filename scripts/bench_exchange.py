"""Time of the exchange kernels against collectives between two kernels: us per call, in CUDA graphs, in one run.

    torchrun --standalone --nproc-per-node 2 scripts/bench_exchange.py OUT.json --two
    python scripts/bench_exchange.py OUT.json            # one GPU: the work of a rank of two alone, and two as streams
    python scripts/bench_exchange.py OUT.json --dry

Rounds alternate between the forms; a time is the median over rounds of the slowest rank's. On two GPUs each part holds
a `cell` for tpcompile/fastpath/ratios.json: the better of the forms with a collective over the one kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from exchange_ranks import DRY, EPS, HEAD_SIZE, HEADS, OPS, WIDTH, Graph, Part, Place, job, machine, run_parts
from torch import Tensor

from tpcompile.fastpath import plain
from tpcompile.fastpath.kernels import all_reduce_norm, qk_exchange, qk_norm
from tpcompile.fastpath.measured import Ratio

FORMS = {"qk": [{"interleaved": False}, {"interleaved": True}], "norm": [{"width": 5120}, {"width": 4096}]}


def times(
    place: Place, forms: dict[str, list[Callable[[], Any]]], *, calls: int = 2 if DRY else 20
) -> dict[str, float]:
    """us a call: form -> its function on each rank here, in CUDA graphs of 20 calls, in interleaved rounds."""
    graphs = {}
    for name, functions in forms.items():
        place.meet()
        streams = [torch.cuda.Stream() if place.device.type == "cuda" else None for _ in functions]
        graphs[name] = [
            Graph(partial(repeated, function, calls), stream)
            for function, stream in zip(functions, streams, strict=True)
        ]
    spent: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(2 if DRY else 7):
        for name, members in graphs.items():
            place.meet()
            for _ in range(3):  # ranks that start at different times are together after that
                replay(members)
            spent[name].append(clocked(place, members, replays=1 if DRY else 20) / calls)
    return {name: statistics.median(found) for name, found in spent.items()}


def clocked(place: Place, members: list[Graph], *, replays: int) -> float:
    """us a replay, of the slowest rank here."""
    if place.device.type != "cuda":
        started = time.perf_counter()
        replay(members)
        return (time.perf_counter() - started) * 1e6
    events = [[torch.cuda.Event(enable_timing=True) for _ in members] for _ in range(2)]
    for event, graph in zip(events[0], members, strict=True):
        event.record(graph.stream)
    for _ in range(replays):
        replay(members)
    for event, graph in zip(events[1], members, strict=True):
        event.record(graph.stream)
    place.synchronize()
    return max(start.elapsed_time(end) for start, end in zip(*events, strict=True)) / replays * 1e3


def replay(members: list[Graph]) -> None:
    for graph in members:
        graph.replay()


def repeated(function: Callable[[], Any], calls: int) -> Any:
    for _ in range(calls):
        result = function()
    return result


def alone_forms(place: Place, op: str, tokens: int) -> dict[str, Any]:
    """The work of one rank of two without its peer: one kernel against what Inductor makes of the plain code."""
    device, dtype = place.device, torch.bfloat16
    row_words = OPS[op][1](dtype, tokens)
    limits = {"num_rows": tokens, "row_words": row_words, "num_programs": place.num_sms()}
    (exchange,) = place.exchanges(1, **limits)
    torch.compiler.reset()
    if op == "qk":
        arguments, options = qk_shard(tokens, 2, device)
        run: Callable[..., Any] = partial(qk_exchange.qk_norm_rope_exchange, *arguments, **options)
        reference = torch.compile(lambda: plain.qk_norm_rope(*arguments, **options), dynamic=False)
        forms = {"two kernels": [lambda: qk_norm.qk_norm_rope(*arguments, **options)]}
    else:
        x, partial_sum, weight = norm_shard(tokens, device)
        run = partial(all_reduce_norm.all_reduce_add_rms_norm, x, partial_sum, weight, eps=EPS)
        reference = torch.compile(lambda: plain.add_rms_norm(x, partial_sum, weight, eps=EPS), dynamic=False)
        forms = {}
    forms["Inductor"] = [reference]
    forms["one kernel"] = [lambda: run(exchange=exchange)]
    for functions in forms.values():
        functions[0]()
    return with_ratio(times(place, forms))


def simulated_forms(place: Place, op: str, tokens: int) -> dict[str, Any]:
    """Two ranks that share one GPU: the time of an exchange without a link between GPUs."""
    ranks = job(place, op, 2, tokens=tokens, dtype=torch.bfloat16)
    return times(place, {"one kernel, 2 ranks on one GPU": [rank.calls[0] for rank in ranks]})


def qk_shard(
    tokens: int, size: int, device: torch.device, interleaved: bool = False
) -> tuple[list[Tensor], dict[str, Any]]:
    width = HEADS * HEAD_SIZE // size
    made = [torch.randn(1, tokens, width) for _ in range(2)]
    made += [torch.rand(width), torch.rand(width)]
    angles = torch.randn(tokens, HEAD_SIZE // 2)
    made += [angles.cos(), angles.sin()]
    options = {"counts": (HEADS * HEAD_SIZE,) * 2, "eps": EPS, "interleaved": interleaved}
    return [x.to(device, torch.bfloat16) for x in made], options


def norm_shard(tokens: int, device: torch.device, width: int = WIDTH) -> list[Tensor]:
    return [x.to(device, torch.bfloat16) for x in (*torch.randn(2, tokens, width), torch.rand(width))]


def with_ratio(found: dict[str, float]) -> dict[str, Any]:
    """One kernel over the best of the others."""
    others = [us for name, us in found.items() if name != "one kernel"]
    return {**found, "ratio": found["one kernel"] / min(others)}


def cell(place: Place, op: str, tokens: int, found: dict[str, Any], *, interleaved: bool, width: int) -> dict[str, Any]:
    """For the table: the better of the forms with a collective over the one kernel."""
    own_width, about = HEADS * HEAD_SIZE // place.group.size(), machine(place)
    one = found["one kernel"]
    ratio = Ratio(
        path="qk_norm_rope_exchange" if op == "qk" else "all_reduce_add_rms_norm",
        gpu=torch.cuda.get_device_name(place.device),
        dtype="bfloat16",
        tp=place.group.size(),
        tokens=tokens,
        widths=(own_width, own_width, HEAD_SIZE // 2) if op == "qk" else (width,),
        variant="interleaved" if interleaved else "",
        ratio_to_inductor=round(1 / found["ratio"], 3),
        num_programs=place.num_sms(),
        us={"inductor": round(one / found["ratio"], 2), "fast path": round(one, 2)},
        command=about["command"],
        versions={name: about[name] for name in ("torch", "triton", "gpu")},
    )
    return ratio.model_dump(mode="json")


def two_forms(place: Place, op: str, tokens: int, *, interleaved: bool = False, width: int = WIDTH) -> dict[str, Any]:
    """Two GPUs: one kernel against two around NCCL's and torch's one-shot all-reduce."""
    import torch.distributed._symmetric_memory as symm

    torch.compiler.reset()
    group, device, size = place.group, place.device, place.group.size()
    row_words = OPS[op][1](torch.bfloat16, tokens)
    limits = {"num_rows": tokens, "row_words": row_words, "max_polls": 2**25}
    (exchange,) = place.exchanges(size, **limits, num_programs=place.num_sms())

    def oneshot(shape: Any, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        memory = symm.empty(shape, dtype=dtype, device=device)
        symm.rendezvous(memory, group)

        def reduce(x: Tensor) -> Tensor:
            memory.copy_(x)
            return torch.ops.symm_mem.one_shot_all_reduce(memory, "sum", group.group_name)

        return reduce

    def nccl(x: Tensor) -> Tensor:
        x = x.clone() if op == "norm" else x
        dist.all_reduce(x, group=group)
        return x

    if op == "qk":
        arguments, options = qk_shard(tokens, size, device, interleaved)
        sums = torch.compile(
            lambda q, k: torch.cat((plain.sum_of_squares(q), plain.sum_of_squares(k)), -1), dynamic=False
        )
        apply = torch.compile(
            lambda total: plain.qk_norm_rope(*arguments, **options, all_reduce=lambda _: total), dynamic=False
        )
        shared = oneshot((1, tokens, 2), torch.float32)
        run: Callable[..., Any] = partial(qk_exchange.qk_norm_rope_exchange, *arguments, **options)
        forms: dict[str, Any] = {
            "Inductor, NCCL": lambda: apply(nccl(sums(*arguments[:2]))),
            "Inductor, one-shot": lambda: apply(shared(sums(*arguments[:2]))),
            "our two, NCCL": lambda: qk_norm.qk_norm_rope(*arguments, **options, all_reduce=nccl),
            "our two, one-shot": lambda: qk_norm.qk_norm_rope(*arguments, **options, all_reduce=shared),
        }
    else:
        x, own, weight = norm_shard(tokens, device, width)
        add = torch.compile(lambda total: plain.add_rms_norm(x, total, weight, eps=EPS), dynamic=False)
        shared = oneshot((tokens, width), torch.bfloat16)
        run = partial(all_reduce_norm.all_reduce_add_rms_norm, x, own, weight, eps=EPS)
        forms = {
            "Inductor, NCCL": lambda: add(nccl(own)),
            "Inductor, one-shot": lambda: add(shared(own)),
        }
    forms["one kernel"] = partial(run, exchange=exchange)
    place.meet()
    for form in forms.values():
        for _ in range(2):
            form()
        place.meet()
    found = times(place, {name: [form] for name, form in forms.items()})
    exchange.check()
    result = with_ratio(found)
    return result | {"cell": cell(place, op, tokens, result, interleaved=interleaved, width=width)}


def timings(place: Place, arguments: argparse.Namespace) -> Iterator[Part]:
    for op, tokens in (("norm", (8, 32, 64, 256, 1024, 4680)), ("qk", (8, 64, 256, 1024, 4680))):
        for number in (2,) if DRY else tokens:
            if place.group is not None:
                for form in FORMS[op]:
                    yield f"us, 2 GPUs: {op}, {number} tokens, {form}", partial(two_forms, place, op, number, **form)
                continue
            yield f"us, no peer: {op} of tp 2, {number} tokens", partial(alone_forms, place, op, number)
            if not DRY and number <= 256:
                yield f"us, simulated: {op}, {number} tokens", partial(simulated_forms, place, op, number)


if __name__ == "__main__":
    run_parts(__doc__, timings)
