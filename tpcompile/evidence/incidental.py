"""Raw text of one compile -> what was normalised in it, counted and hashed: hidden from digests, not from people."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tpcompile.evidence.align import Slot, align
from tpcompile.evidence.domain import by_domain
from tpcompile.evidence.records import Check, CheckId, Layer, Normalised, RankDigest, Status
from tpcompile.evidence.several import grouped

OBJECT_IDS, DEVICE_INDICES, GROUP_NAMES = "object ids", "device indices", "group names"

_KINDS = {  # every pattern begins with fixed text where it can: they run over all text of every compile
    OBJECT_IDS: re.compile(r"\d{12,}|0x[0-9a-fA-F]{5,}"),
    DEVICE_INDICES: re.compile(r"cuda:\d+|xpu:\d+|index=\d+|device=\d+"),
    GROUP_NAMES: re.compile(r"g(?:roup)?_name\S* == '[^']*'|_c10d_functional(?:_autograd)?\.\w[^\n]*'[^'\n]*'"),
}
_LAYERS = {
    "dynamo_cpp_guards_str": Layer.GUARDS,
    "dynamo_output_graph": Layer.GRAPH,
    "aot_forward_graph": Layer.LOWERED,
    "aot_inference_graph": Layer.LOWERED,
    "aot_backward_graph": Layer.LOWERED,
    "inductor_output_code": Layer.KERNELS,
}


def normalised(payloads: Iterable[tuple[str, str]]) -> tuple[Normalised, ...]:
    """`(event name, raw text)` of one compile -> per layer and kind, how many lines hold it and the hash of it."""
    texts: defaultdict[Layer, list[str]] = defaultdict(list)
    for name, payload in payloads:
        if name in _LAYERS:
            texts[_LAYERS[name]].append(payload)
    removed: list[Normalised] = []
    for layer, parts in texts.items():
        text = "\n".join(parts)
        removed += [_removed(kind, layer, pattern.findall(text)) for kind, pattern in _KINDS.items()]
    return tuple(one for one in removed if one.num_items)


def _removed(kind: str, layer: Layer, texts: Sequence[str]) -> Normalised:
    sha = hashlib.sha256(repr(texts).encode()).hexdigest()
    return Normalised(kind=kind, layer=layer, num_items=len(texts), sha256=sha)


_UNITS = {
    Layer.GUARDS: "guards",
    Layer.GRAPH: "graph lines",
    Layer.LOWERED: "lines of lowered graphs",
    Layer.KERNELS: "lines of generated code",
}


def hidden_check(mode: str, digests: Sequence[RankDigest]) -> list[Check]:
    """What the ranks' raw text differed in and the digests do not show: one check for information, or none."""
    counts: Counter[tuple[str, Layer]] = Counter()
    for ranks in by_domain(digests).values():
        for slot in align(ranks):
            counts += _hidden(slot)
    if not counts:
        return []
    texts = [f"{kind} in {number} {_UNITS[layer]}" for (kind, layer), number in sorted(counts.items())]
    return [
        Check(
            id=CheckId.HIDDEN,
            mode=mode,
            status=Status.INFO,
            expected="ids, device indices and group names only",
            observed="; ".join(texts),
        )
    ]


def _hidden(slot: Slot) -> Counter[tuple[str, Layer]]:
    """Kind and layer of what the raw text of one compile differs in -> how many lines."""
    removed = [one for compile_ in slot.compiles.values() for one in compile_.normalised]
    counts: Counter[tuple[str, Layer]] = Counter()
    by_kind = grouped(removed, lambda one: (one.kind, one.layer))
    for key, seen in by_kind.items():
        hashes = {one.sha256 for one in seen}
        if len(hashes) > 1:
            counts[key] = max(one.num_items for one in seen)
    return counts
