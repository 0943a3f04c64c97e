"""`RankRecord` -> layers of canonical items -> `RankDigest`.

The digest of a layer is the hash of the fields of its items; when digests differ, the items are what is shown, so
nothing can be hashed that cannot be explained.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable

from tpcompile.evidence.digests.entered_regions import entered_regions
from tpcompile.evidence.digests.rank_sources import rank_sources
from tpcompile.evidence.digests.recompiles import recompile_of
from tpcompile.evidence.digests.split_regions import splits_of
from tpcompile.evidence.iterables import indexed
from tpcompile.evidence.layers import SPECS
from tpcompile.evidence.records import (
    CompileDigest,
    CompileRecord,
    Item,
    Layer,
    LayerDigest,
    PhaseCounters,
    RankDigest,
    RankRead,
    RankRecord,
    value_item,
)
from tpcompile.evidence.text import normalise
from tpcompile.evidence.text.code import overwritten_reads
from tpcompile.evidence.text.lines import called_at, entered_at, is_library_file, own_line, own_lines
from tpcompile.evidence.text.phrases import phrase
from tpcompile.evidence.text.reasons import nearest_reason


def digest_rank(record: RankRecord) -> RankDigest:
    """Hash the evidence of one rank; the digest is what ranks exchange."""
    compiles = record.compiles
    recompiled = [compile_ for compile_ in compiles if compile_.recompile_reasons]
    cut = [compile_ for compile_ in compiles if compile_.is_cut]
    overwritten = itertools.chain.from_iterable(map(overwritten_items, compiles))
    return RankDigest(
        rank=record.rank,
        domain=record.domain,
        coordinate=record.coordinate,
        coordinates=record.coordinates,
        environment=_sha(environment_items(record)),
        compiles=tuple(digest_compile(compile_, index) for index, compile_ in enumerate(compiles)),
        counters=_counters(record),
        is_cut=record.is_cut or bool(cut),
        splits=splits_of(record),
        regions_counted=sum(region.calls for region in record.regions),
        regions=entered_regions(record),
        breaks=tuple((compile_.phase, found) for compile_ in compiles for found in compile_.breaks),
        recompile_reasons=tuple((one.phase, nearest_reason(one.recompile_reasons)) for one in recompiled),
        recompiles=tuple(recompile_of(compile_, frame=frame_name(compile_)) for compile_ in recompiled),
        places=record.places,
        rank_reads=_rank_reads(record),
        is_code_seen=any(compile_.rank_reads is not None for compile_ in compiles),
        refused_ops=record.refused_ops,
        fast_paths=record.fast_paths,
        overwritten=tuple(overwritten),
        facts=record.facts,
        host=record.host,
    )


def _counters(record: RankRecord) -> tuple[PhaseCounters, ...]:
    """Dynamo's counters, without frames of torch in which it found no op: no break in the user's program began them.

    Seen on torch 2.13.0: guards of a DTensor parameter read `DTensor.device_mesh`, which is then compiled, too.
    """
    empty = [one for one in record.compiles if one.stack and not (one.graphs or one.breaks or one.failure)]
    without_ops = Counter(one.phase for one in empty if is_library_file(one.stack[-1].file))
    return tuple(
        counters.model_copy(update={"frames": counters.frames - without_ops[counters.phase]})
        for counters in record.counters
    )


def _rank_reads(record: RankRecord) -> tuple[RankRead, ...]:
    """What looks rank-dependent, each line once."""
    found: list[RankRead] = []
    for compile_ in record.compiles:
        where = phrase(compile_.phase, frame_name(compile_))
        found += rank_sources(compile_, where)
    # the surest suspect of a line is kept: not every trace reaches every line
    found.sort(key=lambda s: (s.is_sure, not s.receiver))
    return tuple(indexed(found, lambda s: (s.what, s.text, s.line)).values())


def overwritten_items(compile_: CompileRecord) -> tuple[Item, ...]:
    """One item per all-reduce of the generated code that overwrites a buffer which later code reads."""
    items: list[Item] = []
    for kernel in compile_.kernels:
        if kernel.kind != "call":
            continue
        reduced = [c for c in compile_.collectives if (c.phase, c.op) == (kernel.phase, "all_reduce")]
        for number in overwritten_reads(kernel.code):
            line = reduced[number].line if number < len(reduced) else None
            about = f"{kernel.phase} all-reduce #{number} of {frame_name(compile_)}"
            items.append(value_item(about, "overwrites a buffer that later code reads", line=line))
    return tuple(items)


def digest_compile(compile_: CompileRecord, index: int) -> CompileDigest:
    """Hash every observed layer of one compile."""
    called = called_at(compile_.stack)
    callers = tuple(own_lines(compile_.stack[:-1]))
    # the stack that torch logs of a compiled module has all lines of the program
    called_from = compile_.called_from or (callers if called else ())
    layers: list[LayerDigest] = []
    for layer, spec in SPECS.items():
        for part in spec.parts(compile_):  # every other part is *not observed*
            items = layer_items(compile_, layer, part)
            layers.append(LayerDigest(layer=layer, part=part, sha256=_sha(items), num_items=len(items)))
    return CompileDigest(
        index=index,
        compile_id=compile_.compile_id,
        phase=compile_.phase,
        frame=frame_name(compile_),
        step=compile_.step,
        line=own_line(compile_.line, compile_.stack),
        entered_at=entered_at(compile_.line, compile_.stack),
        called_at=called,
        called_from=called_from,
        callers=callers,
        recompile_reasons=compile_.recompile_reasons,
        limit_reached=compile_.limit_reached,
        is_dynamic=any(node.op == "placeholder" and "#" in node.value for node in compile_.dynamo_nodes),
        cache=tuple(dict.fromkeys(compile_.cache)),
        normalised=compile_.normalised,
        layers=tuple(layers),
    )


def frame_name(compile_: CompileRecord) -> str:
    """`function file:line` of the compiled frame, with the path shortened so that machines agree."""
    if compile_.line is None:
        return compile_.function or "?"
    return f"{compile_.function} {normalise.short_path(compile_.line.file)}:{compile_.line.line}"


def layer_items(compile_: CompileRecord, layer: Layer, part: str = "") -> tuple[Item, ...]:
    """Items of one layer of one compile."""
    return _in_order(SPECS[layer].items(compile_, part), is_ordered=SPECS[layer].is_ordered)


def environment_items(record: RankRecord) -> tuple[Item, ...]:
    """Items of the layer that belongs to the rank, not to a compile."""
    spec = SPECS[Layer.ENVIRONMENT]
    return _in_order(spec.of_rank(record), is_ordered=spec.is_ordered)


def _in_order(items: Iterable[Item], *, is_ordered: bool) -> tuple[Item, ...]:
    """Items of an ordered layer as they are; of an unordered one each once, sorted."""
    if is_ordered:
        return tuple(items)
    unique = indexed(items, lambda item: item.key)
    return tuple(item for _, item in sorted(unique.items()))


def _sha(items: Iterable[Item]) -> str:
    hasher = hashlib.sha256()
    for item in items:
        for part in (*item.key, ""):
            data = part.encode()
            hasher.update(len(data).to_bytes(8, "little"))
            hasher.update(data)
    return hasher.hexdigest()
