"""What a page shows -> one HTML file: no network, readable without JavaScript, hostile names inert."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from tpcompile.report.page.evidence import Event
from tpcompile.report.page.shown import View


def page(view: View) -> str:
    """The page as HTML."""
    style, script = _read("page.css"), _read("page.js")
    data = json.dumps(_data(view), separators=(",", ":"))
    for character in "<>&":  # so that it cannot end the element it stands in, whatever its texts hold
        data = data.replace(character, f"\\u{ord(character):04x}")
    return _template().render(
        view=view,
        style=Markup(style),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=Markup(data),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = _bytes_text
    return environment.from_string(_read("page.html"))


def _read(name: str) -> str:
    return (files("tpcompile.report.page") / "static" / name).read_text(encoding="utf-8")


def _data(view: View) -> dict[str, Any]:
    return {
        "clock": view.has_clock,
        "lanes": [
            {"ranks": lane.ranks, "odd": lane.is_odd, "events": _events(lane.events), "more": lane.num_left_out}
            for lane in view.lanes
        ],
        "size": view.world_size,
        "grid": [{"name": layer.name, "codes": layer.codes, "groups": layer.groups} for layer in view.grid],
        "guards": [
            {
                "where": guards.where,
                "rows": [
                    [row.about, row.place, [[value.ranks, value.text] for value in row.values]] for row in guards.rows
                ],
            }
            for guards in view.guards
        ],
    }


def _events(events: Sequence[Event]) -> list[list[object]]:
    return [
        [one.kind, round(one.start, 6), round(one.end, 6), one.label, one.detail, str(one.line or "")] for one in events
    ]


def _bytes_text(num_bytes: int) -> str:
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"
