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
from .columns import COLUMNS, Column, best_of, cell, seconds, share
from .recorder import Record
from .summary import summarise

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_WORST_APPS: Final = 6
# Characters: of the widest cell, and of a line that is not for a terminal.
_CELL: Final = 9
_PIPED: Final = 100_000


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
    if console is None and not terminal.is_terminal:
        terminal.width = _PIPED  # whoever reads a file or a pipe wraps by himself
    for part in _shown(found, terminal.width):
        terminal.print(part)


def _shown(found: Mapping[str, Mapping[str, Any]], width: int) -> list[RenderableType]:
    """As many policies beside each other as have room. Names come from files that users wrote: they are `Text`, so that
    brackets in them are no markup."""
    from rich.text import Text

    first = next(iter(found.values()))
    head = f"{first['scenario']}: {first['requests']:,} requests in {html.span(first['duration_s'])}, "
    head += f"{len(first['applications']):,} applications, {first['nodes']:,} devices, seed {first['seed']}"
    shown = [c for c in COLUMNS if any(c.value(summary) is not None for summary in found.values())]
    titles, helps = max(len(column.title) for column in shown), max(len(column.help) for column in shown)
    parts: list[RenderableType] = [Text(head, style="bold")]
    room, group = width - titles - 2, list[str]()
    for name in found:
        room -= (needs := max(len(name), _CELL) + 2)
        if group and room < 0:
            parts.append(_table(found, group, shown, explained=False))
            room, group = width - titles - 2 - needs, []
        group.append(name)
    fits = room >= helps + 2
    parts.append(_table(found, group, shown, explained=fits))
    if not fits:
        parts.append(Text("; ".join(f"{column.title}: {column.help}" for column in shown), style="dim"))
    for name, summary in found.items():
        parts += [Text(f"{name}: {line}", style=style) for line, style in _lines(summary)]
    return parts


def _table(
    found: Mapping[str, Mapping[str, Any]], names: Sequence[str], shown: Sequence[Column], *, explained: bool
) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", no_wrap=True)
    if explained:
        table.add_column("", style="dim", no_wrap=True)
    for column in shown:
        best = best_of(column, found) if len(found) > 1 else ()
        cells = [
            Text(cell(column, column.value(found[name])), style="bold green" if name in best else "") for name in names
        ]
        table.add_row(Text(column.title), *cells, *([Text(column.help)] if explained else []))
    table.add_row(Text("simulated in"), *(Text(seconds(found[name]["took_s"])) for name in names))
    return table


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
