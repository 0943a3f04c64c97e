"""Raw text of one compile -> what is normalised in it, counted and hashed: not part of digests, shown in the report."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tpcompile.evidence.compiles.events import OBSERVED_IN
from tpcompile.evidence.groups.align import align
from tpcompile.evidence.groups.domain import by_domain
from tpcompile.evidence.iterables import differ, grouped
from tpcompile.evidence.records import Check, CheckId, Layer, Normalised, RankDigest, Status

OBJECT_IDS, DEVICE_INDICES, GROUP_NAMES = "object ids", "device indices", "group names"

_KINDS = {  # every pattern begins with fixed text where it can: they run over all text of every compile
    OBJECT_IDS: re.compile(r"\d{12,}|0x[0-9a-fA-F]{5,}"),
    DEVICE_INDICES: re.compile(r"cuda:\d+|xpu:\d+|index=\d+|device=\d+"),
    GROUP_NAMES: re.compile(
        r"g(?:roup)?_name(?:(?!g(?:roup)?_name)\S)*+ == '[^']*'|_pg_registry\['[^']*'\]"
        r"|_c10d_functional(?:_autograd)?\.\w(?:(?!_c10d_functional)[^\n])*'[^'\n]*'"
    ),
}


def normalised(payloads: Iterable[tuple[str, str]]) -> tuple[Normalised, ...]:
    """`(event name, raw text)` of one compile -> per layer and kind, the number of occurrences and their hash."""
    texts: defaultdict[Layer, list[str]] = defaultdict(list)
    for name, payload in payloads:
        if name in OBSERVED_IN:
            layer, _ = OBSERVED_IN[name]
            texts[layer].append(payload)
    removed: list[Normalised] = []
    for layer, parts in texts.items():
        text = "\n".join(parts)
        removed += _removed(layer, text)
    return tuple(removed)


@functools.lru_cache(maxsize=64)
def _removed(layer: Layer, text: str) -> tuple[Normalised, ...]:
    """What is normalised in the text of a layer, one record per kind that occurs; kept as what is parsed."""
    removed: list[Normalised] = []
    for kind, pattern in _KINDS.items():
        found = pattern.findall(text)
        if found:
            sha = hashlib.sha256(repr(found).encode()).hexdigest()
            removed.append(Normalised(kind=kind, layer=layer, num_items=len(found), sha256=sha))
    return tuple(removed)


_UNITS = {
    Layer.GUARDS: "guards",
    Layer.GRAPH: "graph lines",
    Layer.LOWERED: "lines of lowered graphs",
    Layer.KERNELS: "lines of generated code",
}


def hidden_check(mode: str, digests: Sequence[RankDigest]) -> list[Check]:
    """Differences of the ranks' raw text that the digests leave out: one check for information, or none."""
    counts: Counter[tuple[str, Layer]] = Counter()
    for ranks in by_domain(digests).values():
        for slot in align(ranks):
            removed = itertools.chain.from_iterable(compile_.normalised for compile_ in slot.compiles.values())
            for key, of_kind in grouped(removed, lambda one: (one.kind, one.layer)).items():
                if differ(one.sha256 for one in of_kind):
                    counts[key] += max(one.num_items for one in of_kind)
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
