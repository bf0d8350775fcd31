"""The figures by which policies are compared: their names, where they stand in a summary, and how they are written.

The terminal's table and the HTML page show the same columns. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

Summary = Mapping[str, Any]


class Column(NamedTuple):
    """value picks the figure; unit is "share", "seconds", "count" or "amount". best is "high", "low" or "" where no
    value is better. bar draws it: "share" of the whole, or against the "most" of all policies."""

    title: str
    help: str
    value: Callable[[Summary], float | None]
    unit: str
    best: str = ""
    bar: str = ""


def _lead(kind: str) -> Callable[[Summary], float | None]:
    return lambda s: s["attainment"]["of_all"][kind]


def _hour(kind: str) -> Callable[[Summary], float | None]:
    """Nothing where there is but one hour: it would say again what the whole says."""
    return lambda s: s["worst_hour"][kind] if len(s["hours"]) > 1 else None


def _app(kind: str) -> Callable[[Summary], float | None]:
    return lambda s: s["worst_application"][kind]


def _recovery_s(summary: Summary) -> float | None:
    """The longest; none without bursts; infinite where one was not recovered from by the end."""
    times = [burst["recovery_s"] for burst in summary["bursts"]]
    return max((math.inf if one is None else one for one in times), default=None)


COLUMNS: Final = (
    Column("kept", "requests whose promise was kept, of all", _lead("overall"), "share", "high", "share"),
    Column("TTFT", "requests whose first token came in time, of all", _lead("ttft"), "share", "high"),
    Column("TPOT", "requests whose later tokens came in time, of all", _lead("tpot"), "share", "high"),
    Column("of ended", "kept, of the requests that got all their tokens",
           lambda s: s["attainment"]["of_ended"]["overall"], "share", "high"),
    Column("worst hour", "kept, in the hour that has the least", _hour("overall"), "share", "high"),
    Column("worst hour TTFT", "first tokens in time, in the hour that has the least", _hour("ttft"), "share", "high"),
    Column("worst hour TPOT", "later tokens in time, in the hour that has the least", _hour("tpot"), "share", "high"),
    Column("worst app", "kept, of the application with the least (of those with 100 requests or more)",
           _app("overall"), "share", "high"),
    Column("worst app TTFT", "first tokens in time, of the application with the least", _app("ttft"), "share", "high"),
    Column("worst app TPOT", "later tokens in time, of the application with the least", _app("tpot"), "share", "high"),
    Column("tail apps", "kept, of the applications with fewer than 100 requests together",
           lambda s: s["tail"]["attainment"]["of_all"]["overall"], "share", "high"),
    Column("TTFT p50", "half of the first tokens came within this", lambda s: s["ttft_s"]["p50"], "seconds", "low"),
    Column("TTFT p99", "99 % of the first tokens came within this", lambda s: s["ttft_s"]["p99"], "seconds", "low"),
    Column("TPOT p99", "99 % of requests had this or less a token", lambda s: s["tpot_s"]["p99"], "seconds", "low"),
    Column("recovery", "from the begin of a burst until 95 % are kept again for good, the longest",
           _recovery_s, "seconds", "low"),
    Column("device-hours", "while they hold a model, within the trace's time", lambda s: s["devices"]["device_hours"],
           "amount", "low", "most"),
    Column("devices, mean", "held on average", lambda s: s["devices"]["mean"], "amount"),
    Column("devices, most", "held at one time", lambda s: s["devices"]["peak"], "count"),
    Column("of cluster", "devices held on average, of all that there are", lambda s: s["devices"]["share_of_cluster"],
           "share"),
    Column("busy", "of the time that devices were held, spent on steps", lambda s: s["devices"]["busy"], "share"),
    Column("moves", "models loaded, woken or forked",
           lambda s: sum(s["decisions"].get(verb, 0) for verb in ("load", "wake", "fork")), "count"),
)  # fmt: skip


def cell(column: Column, value: float | None) -> str:
    match column.unit:
        case "share":
            return share(value)
        case "seconds":
            return seconds(value)
        case _:
            return amount(value)


def share(value: float | None) -> str:
    """Rounded down: 99.96 % kept is not all kept."""
    return "–" if value is None else f"{math.floor(value * 1000 + 1e-9) / 10:.1f} %"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if math.isinf(value):
        return "never"
    if not value:
        return "0 s"
    if value < 1.0:
        return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"
    return f"{value:.2f} s" if value < 100.0 else f"{value:,.0f} s"


def amount(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 100.0 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10.0 else f"{value:.3g}"


def best_of(column: Column, found: Mapping[str, Summary]) -> set[str]:
    """The policies that show the best of a column; none where nothing is better, or all are alike."""
    known = {name: value for name, summary in found.items() if (value := column.value(summary)) is not None}
    if not column.best or not known:
        return set()
    written = {name: cell(column, value) for name, value in known.items()}
    wanted = (max if column.best == "high" else min)(known.values())
    best = {name for name, value in known.items() if written[name] == cell(column, wanted)}
    return set() if len(best) == len(known) else best
