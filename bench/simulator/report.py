"""What a simulation shows: a table on the terminal, and a folder with JSON, figures and one HTML page.

`write` is called once when all policies have run. The files are made of records alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from janus_server.errors import BadConfig

from . import figures, html
from .columns import COLUMNS, best_of, cell, seconds, share
from .recorder import Record
from .summary import summarise

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WORST_APPS: Final = 6


def write(
    records: Mapping[str, Record], out: Path | None = None, *, bursts_s: Sequence[float] = (), pictures: bool = True
) -> dict[str, Any]:
    """Prints the table, writes the files where a folder is given, and returns the summaries by policy."""
    if not records:
        raise BadConfig("there is nothing to report: no policy ran")
    found = {name: summarise(record, bursts_s) for name, record in records.items()}
    show(found)
    if out is not None:
        for path in save(records, found, out):
            print(f"wrote {path}")
        if pictures:
            try:
                drawn = figures.draw(out, records, found)
            except BadConfig as error:  # the page has all of it: who lacks a library is told, and has the rest
                print(f"no pictures: {error}")
            else:
                for path in drawn:
                    print(f"wrote {path}")
    return found


def save(records: Mapping[str, Record], found: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """summary.json and report.html."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        written = [out / "summary.json", out / "report.html"]
        written[0].write_text(json.dumps(_plain(found), indent=1, allow_nan=False), encoding="utf-8")
        written[1].write_text(html.page(records, found), encoding="utf-8")
        return written
    except OSError as error:
        raise BadConfig(f"the report cannot be written to {out}: {error.strerror or error}") from None


def show(found: Mapping[str, Mapping[str, Any]], console: Console | None = None) -> None:
    """Policies beside each other, then what is to be known of each."""
    from rich.console import Console as Terminal

    terminal = console or Terminal(highlight=False)
    for part in _shown(found):
        terminal.print(part)


def _shown(found: Mapping[str, Mapping[str, Any]]) -> list[RenderableType]:
    """Names come from files that users wrote: they are `Text`, so that brackets in them are no markup."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    first = next(iter(found.values()))
    head = f"{first['scenario']}: {first['requests']:,} requests in {html.span(first['duration_s'])}, "
    head += f"{len(first['applications']):,} applications, {first['nodes']:,} devices, seed {first['seed']}"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for name in found:
        table.add_column(Text(name), justify="right", no_wrap=True)
    best = {column.title: best_of(column, found) for column in COLUMNS}
    for column in COLUMNS:
        values = {name: column.value(summary) for name, summary in found.items()}
        if all(value is None for value in values.values()):
            continue
        cells = [
            Text(cell(column, value), style="bold green" if len(found) > 1 and name in best[column.title] else "")
            for name, value in values.items()
        ]
        table.add_row(Text(column.title), *cells)
    table.add_row(Text("simulated in"), *(Text(seconds(f["took_s"])) for f in found.values()))
    parts: list[RenderableType] = [Text(head, style="bold"), table]
    for name, summary in found.items():
        parts += [Text(f"{name}: {line}", style=style) for line, style in _lines(summary)]
    return parts


def _lines(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a table of policies leaves out, each with its style."""
    lines = []
    dips = summary["dips"]
    if dips["spells"]:
        longest = dips["longest"][0]
        lines.append((f"under 95 % (in windows of 5 s) for {dips['seconds_below']:,.0f} s in all, the longest spell "
                      f"{longest['lasts_s']:,.0f} s from second {longest['from_s']:,.0f}", ""))  # fmt: skip
    for burst in summary["bursts"]:
        recovery = burst["recovery_s"]
        after = "not recovered by the end" if recovery is None else f"recovered after {recovery:,.0f} s"
        lines.append((f"burst at second {burst['at_s']:,.0f}: {after}", ""))
    missed = [a for a in summary["applications"] if a["kept"] is False]
    missed.sort(key=lambda a: (a["attainment"]["of_all"]["overall"], a["name"]))
    if missed:
        some = ", ".join(f"{a['name']} {share(a['attainment']['of_all']['overall'])}" for a in missed[:_WORST_APPS])
        more = f" and {len(missed) - _WORST_APPS} more" if len(missed) > _WORST_APPS else ""
        lines.append((f"{len(missed)} applications below what they were promised: {some}{more}", ""))
    lines += [(f"! {note}", "yellow") for note in summary["notes"]]
    return lines


def _plain(value: Any) -> Any:
    """For JSON: what is not a number is null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case _:
            return value
