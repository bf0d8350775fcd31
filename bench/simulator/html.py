"""The HTML report: one file that holds its data, style and script, and asks nothing of any network.

`report` calls `page`. The table of policies is made here, so that it is there without scripts too; `page.js` draws the
charts from the data. Names come from files that users wrote: all text is escaped, here and there.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np

from .columns import COLUMNS, best_of, cell
from .recorder import Record
from .tallies import Part

_COLUMNS: Final = 480
_LAYERS: Final = 11
_ROWS: Final = 80
_WINDOW_S: Final = 5.0


def page(records: Mapping[str, Record], found: Mapping[str, Mapping[str, Any]]) -> str:
    """found are the summaries of the records, by the same policies."""
    record = next(iter(records.values()))
    scenario, shown = record.scenario, _shown(records)
    data = {
        "duration_s": max(scenario.duration_s, 1e-9),
        "nodes": len(scenario.nodes),
        "window_s": _window_s(record),
        "policies": [_policy(name, records[name], found[name], shown) for name in records],
    }
    facts = [
        ("requests", f"{max(f['requests'] for f in found.values()):,}"),
        ("applications", f"{len(scenario.apps):,}"),
        ("models", f"{len(scenario.models):,}"),
        ("devices", f"{len(scenario.nodes):,}"),
        ("of simulated time", span(scenario.duration_s)),
    ]
    here = Path(__file__)
    parts = {
        "@TITLE@": escape(f"Simulation: {scenario.name}"),
        "@FACTS@": "".join(f"<span><b>{escape(value)}</b> {escape(name)}</span>" for name, value in facts)
        + f"<span>seed <b>{scenario.seed}</b></span>",
        "@TABLE@": _table(found),
        "@NOTES@": _notes(found),
        "@SCRIPT@": here.with_name("page.js").read_text(encoding="utf-8"),
        "@DATA@": _embedded(data),
    }
    text = here.with_name("page.html").read_text(encoding="utf-8")
    # Cut at the marks rather than replaced one after the other: data may hold what looks like one.
    return "".join(parts.get(piece, piece) for piece in re.split("(@[A-Z]+@)", text))


def span(seconds: float) -> str:
    if seconds >= 7200.0:
        return f"{seconds / 3600.0:g} h" if seconds % 360.0 == 0.0 else f"{seconds / 3600.0:.1f} h"
    return f"{seconds:g} s"


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Policies beside each other; the best of each column stands out where there are several."""
    shown = [c for c in COLUMNS if any(c.value(summary) is not None for summary in found.values())]
    head = "".join(f'<th title="{escape(c.help)}">{escape(c.title)}</th>' for c in shown)
    rows = []
    best = {c.title: best_of(c, found) for c in shown}
    for name, summary in found.items():
        cells = [f"<td><b>{escape(name)}</b></td>"]
        for column in shown:
            value = column.value(summary)
            style = ' class="best"' if len(found) > 1 and name in best[column.title] else ""
            bar = ""
            if column.bar and value is not None:
                most = max((column.value(f) or 0.0) for f in found.values()) if column.bar == "most" else 1.0
                bar = f'<span class="bar"><i style="width:{100.0 * value / max(most, 1e-9):.1f}%"></i></span>'
            cells.append(f"<td><span{style}>{escape(cell(column, value))}</span>{bar}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr><th>policy</th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _notes(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"<li><b>{escape(name)}</b>: {escape(note)}</li>" for name, f in found.items() for note in f["notes"]]
    return f'<ul class="notes">{"".join(lines)}</ul>' if lines else ""


def _policy(name: str, record: Record, found: Mapping[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    line = record.timeline
    column_s, load, attained = _over_time(record)
    return {
        "name": name,
        "closed_s": record.closed_s,
        "device_hours": found["devices"]["device_hours"],
        "overall": found["attainment"]["of_all"]["overall"],
        "column_s": column_s,
        "load": load,
        "attainment": attained,
        "timeline": {"width_s": line.width_s, "held": _short(line.held()), "serving": _short(line.serving())},
        "layers": _layers(line.models, line.shares(), shown),
        "pools": [{"name": pool, "values": _short(line.pools()[:, k])} for k, pool in enumerate(line.pool_names)],
        **_replicas(record),
        **_heat(record, found),
        "sentences": [[round(s.at_s, 3), s.kind, s.model, s.node, s.why] for s in record.decisions.sentences],
        "decided": sum(n for kind, n in record.decisions.counts.items() if kind != "dispatch"),
        "transitions": found["transitions"],
        "hours": found["hours"],
        "latest": found["latest"],
        "failures": [[why, f["requests"], f["example"]] for why, f in found["failures"].items()],
    }


def _window_s(record: Record) -> float:
    return max(_WINDOW_S, _column_s(record))


def _column_s(record: Record) -> float:
    tallies = record.tallies
    each = max(1, math.ceil(len(tallies.seconds) / _COLUMNS))
    return each * tallies.second_s


def _over_time(record: Record) -> tuple[float, list[float], dict[str, list[float | None]]]:
    """Seconds a column, requests a second, and attainment of the window that ends with each column."""
    tallies, column_s = record.tallies, _column_s(record)
    each = round(column_s / tallies.second_s)
    padded = np.pad(tallies.seconds, ((0, -len(tallies.seconds) % each), (0, 0)))
    columns = padded.reshape(-1, each, padded.shape[1]).sum(axis=1)
    width = max(1, round(_window_s(record) / column_s))
    total = np.cumsum(np.pad(columns, ((width, 0), (0, 0))), axis=0)
    windows = total[width:] - total[:-width]
    attained = {
        kind: [None if not row[Part.CAME] else round(int(row[part]) / int(row[Part.CAME]), 4) for row in windows]
        for kind, part in (("overall", Part.GOOD), ("ttft", Part.TTFT), ("tpot", Part.TPOT))
    }
    return column_s, _short(columns[:, Part.CAME] / column_s), attained


def _shown(records: Mapping[str, Record]) -> list[str]:
    """The models that held the most devices over all policies: each has one colour on the whole page."""
    total: dict[str, float] = {}
    for record in records.values():
        for model, held in zip(record.timeline.models, record.timeline.shares().mean(axis=0).tolist(), strict=True):
            total[model] = total.get(model, 0.0) + held
    return sorted((m for m, held in total.items() if held > 0.0), key=lambda m: (-total[m], m))[:_LAYERS]


def _layers(models: Sequence[str], shares: np.ndarray, shown: Sequence[str]) -> list[dict[str, Any]]:
    """Those shown, in their order, and the others together."""
    at = {model: i for i, model in enumerate(models)}
    layers: list[dict[str, Any]] = [{"name": model, "values": _short(shares[:, at[model]])} for model in shown]
    rest = [i for i, model in enumerate(models) if model not in shown and shares[:, i].any()]
    if rest:
        layers.append({"name": f"{len(rest)} others", "values": _short(shares[:, rest].sum(axis=1)), "other": True})
    return layers


def _replicas(record: Record) -> dict[str, Any]:
    """Rows by model, those with the most replicas first; a column is one bin or several."""
    line = record.timeline
    mean, most = line.replicas(), line.most_replicas()
    each = max(1, math.ceil(len(mean) / _COLUMNS))
    columns = np.pad(mean, ((0, -len(mean) % each), (0, 0))).reshape(-1, each, mean.shape[1]).mean(axis=1)
    had = [i for i in range(mean.shape[1]) if most[:, i].any()]
    order = sorted(had, key=lambda i: (-most[:, i].max(), line.models[i]))
    rows = [{"name": line.models[i], "most": round(float(most[:, i].max()), 2), "values": _short(columns[:, i])}
            for i in order[:_ROWS]]  # fmt: skip
    return {"replicas": rows, "replica_bins": each}


def _heat(record: Record, found: Mapping[str, Any]) -> dict[str, Any]:
    """Attainment of each application over time, the busiest first."""
    tallies, apps = record.tallies, found["applications"]
    order = sorted(range(len(apps)), key=lambda i: (-apps[i]["requests"], i))[:_ROWS]
    rows = [
        {
            "name": apps[i]["name"],
            "requests": apps[i]["requests"],
            "overall": apps[i]["attainment"]["of_all"]["overall"],
            "missed": apps[i]["kept"] is False,
            "cells": [round(good / came, 3) if came else None for came, good in tallies.heat[i].tolist()],
        }
        for i in order
    ]
    return {"heat": rows, "heat_s": tallies.column_s}


def _short(values: np.ndarray) -> list[float]:
    """Three figures after the point are more than a picture shows."""
    return [round(value, 3) + 0.0 for value in values.tolist()]


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element that it stands in, nor be read as a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
