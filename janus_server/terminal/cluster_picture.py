"""What `janus status` draws: nodes with their pages, models, applications, the last decisions. Pure.

A bar is a node's pool: a model's capital letter for weights, its small one for KV cache, # for scratch, a dot for what
is free. A model has the same letter and colour wherever it is shown.
"""

from __future__ import annotations

import string
import time
from collections.abc import Mapping, Sequence
from typing import Final

from janus_server.api.cluster import (
    ApplicationView,
    ClusterView,
    Decision,
    LeaderView,
    ModelView,
    NodeView,
    decisions_of,
    leads_of,
    where_served,
)
from janus_server.terminal.client import plain, printable
from janus_server.terminal.course import Course, Sum, quantile, total
from janus_server.terminal.lines import COLOURS, Line, Span
from janus_server.units import format_seconds

_BAR: Final = 40
_FREE, _SCRATCH = "·", "#"
_KINDS: Final = {"failed": "red", "lost": "red", "refused": "yellow", "left": "yellow", "done": "green"}


class Marks:
    """The letter and the colour of each model."""

    def __init__(self, view: ClusterView) -> None:
        self._index = {name: i for i, name in enumerate(sorted(where_served(view)))}

    def letter(self, model: str) -> str:
        return string.ascii_uppercase[self._index[model] % 26]

    def colour(self, model: str) -> str:
        return COLOURS[self._index[model] % len(COLOURS)]


def drawing(view: ClusterView, course: Course, columns: int, decisions: int, stale: str = "") -> list[Line]:
    """All of it; stale says why it is old."""
    marks, leads = Marks(view), leads_of(view)
    lines: list[Line] = [_head(view, course)]
    if stale:
        lines.append((Span(stale, "bold red"),))
    lines += [(), *_nodes(view, marks, leads, columns)]
    lines += [(), *_models(view, marks, leads)]
    applications = _applications(view, course)
    if applications:
        lines += [(), *applications]
    decided = decisions_of(view)
    if decided and decisions > 0:
        lines += [(), (Span("LAST DECISIONS", "bold"),)]
        lines += [_decision(one, columns) for one in decided[-decisions:]]
    return lines


def _head(view: ClusterView, course: Course) -> Line:
    there = sum(node.trouble is None for node in view.nodes)
    leader = f"{printable(view.leader)} leads, term {view.term}" if view.leader is not None else "nobody leads"
    nodes = "one node" if len(view.nodes) == 1 else f"{there} of {len(view.nodes)} nodes answer"
    said = [leader, nodes, f"seen by {printable(view.asked)} at {_clock(view.time)}"]
    if course.over_s:
        rate = sum(one.requests for one in course.sums().values()) / course.over_s
        said.insert(2, f"{rate:.3g} requests/s")
    style = "bold" if view.leader is not None and there == len(view.nodes) else "bold yellow"
    return (Span("; ".join(said), style),)


def _nodes(view: ClusterView, marks: Marks, leads: LeaderView | None, columns: int) -> list[Line]:
    leaving = () if leads is None else leads.draining
    rows = [("NODE", "UP", "PAGES", "FREE", "")]
    bars: list[Line] = [()]
    for node in view.nodes:
        if node.trouble is not None:
            rows.append((printable(node.node), "-", "-", "-", printable(node.trouble)))
            bars.append(())
            continue
        notes = [
            *(["leads"] if node.node == view.leader else []),
            *(["being emptied"] if node.node in leaving else []),
            *(["stopping"] if node.leaving else []),
            *([printable(node.url)] if node.url else []),
        ]
        up = format_seconds(round(node.up_s))
        rows.append((printable(node.node), up, str(node.pool_pages), str(node.free_pages), ", ".join(notes)))
        bars.append(bar(node, marks, max(8, min(_BAR, columns - 60))))
    lines: list[Line] = []
    for node_view, cells, drawn in zip([None, *view.nodes], plain(rows, (1, 2, 3)), bars, strict=True):
        style = "bold" if node_view is None else "red" if node_view.trouble is not None else ""
        lines.append((Span(cells, style), *((Span("  "), *drawn) if drawn else ())))
    return lines


def bar(node: NodeView, marks: Marks, width: int) -> Line:
    """The node's pool in `width` cells."""
    parts: list[tuple[int, Span]] = [(node.scratch_pages, Span(_SCRATCH, "dim"))]
    for one in sorted(node.models, key=lambda one: one.model):
        letter, colour = marks.letter(one.model), marks.colour(one.model)
        parts += [(one.weight_pages, Span(letter, f"black on {colour}")), (one.kv_pages, Span(letter.lower(), colour))]
    used = sum(pages for pages, _ in parts)
    parts.append((max(0, node.pool_pages - used), Span(_FREE, "dim")))
    counts = cells([pages for pages, _ in parts], width)
    return tuple(Span(span.text * n, span.style) for n, (_, span) in zip(counts, parts, strict=True) if n)


def cells(parts: Sequence[int], width: int) -> list[int]:
    """How many of `width` cells each part gets: as many as it is large, one at least where it is anything.

    Example: 1, 99 and 0 in 10 cells are 1, 9 and 0.
    """
    whole = sum(parts)
    if not whole:
        return [0] * len(parts)
    counts = [max(1, part * width // whole) if part else 0 for part in parts]
    order = sorted(range(len(parts)), key=lambda i: parts[i] * width / whole - counts[i], reverse=True)
    for i in order:
        if sum(counts) >= width:
            break
        if parts[i]:
            counts[i] += 1
    while sum(counts) > width and max(counts) > 1:
        counts[counts.index(max(counts))] -= 1
    return counts


def _models(view: ClusterView, marks: Marks, leads: LeaderView | None) -> list[Line]:
    served = where_served(view)
    head = ("", "MODEL", "SERVED BY", "WARM ON", "RUNNING", "WAITING", "NOTE")
    rows, styles = [head], ["bold"]
    for name in sorted(served):
        here = [(node.node, one) for node in view.nodes for one in node.models if one.model == name]
        waiting = sum(one.held for _, one in here)
        if leads is not None:
            waiting = max(waiting, leads.waiting.get(name, 0))
        letter = marks.letter(name)
        rows.append((
            letter + letter.lower(), printable(name), names(served[name]),
            names([node for node, one in here if one.stage == "warm"]),
            str(sum(one.running for _, one in here)), str(waiting), _note(here, leads, name),
        ))  # fmt: skip
        styles.append(marks.colour(name))
    lines = plain(rows, (4, 5))
    return [(Span(line[:2], style), Span(line[2:], "bold" if i == 0 else ""))
            for i, (line, style) in enumerate(zip(lines, styles, strict=True))]  # fmt: skip


def names(nodes: Sequence[str]) -> str:
    return " ".join(map(printable, nodes)) or "-"


def _note(here: Sequence[tuple[str, ModelView]], leads: LeaderView | None, name: str) -> str:
    """What is out of the ordinary anywhere, node by node."""
    found = []
    for node, one in here:
        where = printable(node)
        if one.under_way is not None:
            total_bytes = one.under_way.total_bytes
            share = f" {one.under_way.done_bytes / total_bytes:.0%}" if total_bytes else ""
            found.append(f"{one.under_way.verb} on {where}{share}")
        elif one.goal is not None and one.goal != one.stage:
            found.append(f"to be {one.goal} on {where}")
        if one.draining:
            found.append(f"draining on {where}")
        if one.pinned:
            found.append(f"pinned on {where}")
        if one.trouble is not None:
            found.append(f"{where}: {printable(one.trouble)}")
    prediction = None if leads is None else leads.predictions.get(name)
    return ", ".join(found) or ("" if prediction is None else printable(prediction.says))


def _applications(view: ClusterView, course: Course) -> list[Line]:
    """Over the last minute; at the first look, since the nodes started."""
    sums, over_s = course.sums(), course.over_s
    if not over_s:
        sums = total(one for node in view.nodes for one in node.applications)
    if not sums:
        return []
    when = f"OVER THE LAST {round(over_s)} S" if over_s else "SINCE THE NODES STARTED"
    head = ("APPLICATION", "MODEL", "REQUESTS", "FAILED", "ON TIME", "TTFT P50", "P99", "TPOT P50", "P99", "PROMISED")
    rows = [head, *(_application(name, one) for name, one in sorted(sums.items()))]
    first, *rest = plain(rows, (2, 3, 4, 5, 6, 7, 8))
    return [(Span(f"{first}  ", "bold"), Span(when, "dim")), *(_judged(line, name, sums) for line, name in zip(
        rest, sorted(sums), strict=True))]  # fmt: skip


def _judged(line: str, name: str, sums: Mapping[str, Sum]) -> Line:
    one = sums[name]
    late = one.ended and one.attained < (one.view.attain or 0.0) * one.ended
    return (Span(line, "red" if late else ""),)


def _application(name: str, one: Sum) -> tuple[str, ...]:
    times = [quantile(spread, share) for spread in (one.ttft, one.tpot) for share in (0.5, 0.99)]
    return (
        printable(name), printable(one.view.model), str(one.requests), str(one.failed),
        f"{one.attained / one.ended:.1%}" if one.ended else "-",
        *("-" if time_s is None else format_seconds(time_s) for time_s in times),
        promised(one.view),
    )  # fmt: skip


def promised(one: ApplicationView) -> str:
    """Example: 95 % in TTFT 300 ms, TPOT 50 ms."""
    parts = [f"{name} {format_seconds(time_s)}"
             for name, time_s in (("TTFT", one.ttft_s), ("TPOT", one.tpot_s)) if time_s is not None]  # fmt: skip
    if not parts:
        return "-"
    return (f"{100 * one.attain:.6g} % in " if one.attain is not None else "") + ", ".join(parts)


def _decision(one: Decision, columns: int) -> Line:
    text = f" {printable(one.node or '-'):6} {one.verb or one.kind:7} {printable(one.why)}"
    when = _clock(one.time)
    room = max(20, columns - len(when))
    return (Span(when, "dim"), Span(text if len(text) <= room else text[: room - 1] + "…", _KINDS.get(one.kind, "")))


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))
