"""`janus memory`: the page pool of a running server drawn as a map, with what each model holds and how well it is used.

Called by `cli`. It speaks HTTP only. A cell stands for a number of pages and shows who holds most of them: a model's
capital letter for weights, its small one for KV cache, a dot where most are free. `drawing` is pure.
"""

from __future__ import annotations

import asyncio
import shutil
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from janus_server.api.admin import MemoryMap, PageRun
from janus_server.terminal.client import Client, Failed, Target, plain, printable, target
from janus_server.terminal.lines import COLOURS, Line, Span, rich_of, show
from janus_server.units import format_bytes

_ROWS = 16
_MOST_COLUMNS = 96
_FREE, _SCRATCH = "·", "#"


class MemoryOptions(msgspec.Struct, frozen=True):
    """What the command line asked for. key and folders say where the admin key comes from."""

    url: str
    as_json: bool = False
    watch: bool = False
    every_s: float = 1.0
    key: str | None = None
    folders: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"MemoryOptions({self.url})"


def run(options: MemoryOptions) -> int:
    try:
        server = target(options.url, options.key, options.folders)
        if options.watch:
            _watch(server, options)
        else:
            _print(asyncio.run(_map(server)), options)
        return 0
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1


async def _map(server: Target) -> MemoryMap:
    async with Client(server) as client:
        return await client.get("/admin/memory", MemoryMap)


def _print(found: MemoryMap, options: MemoryOptions) -> None:
    if options.as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        show(drawing(found, _columns()))


def _watch(server: Target, options: MemoryOptions) -> None:
    """Again and again until Ctrl-C, which is how it ends well: drawn over on a terminal, else one after the other."""
    try:
        if not sys.stdout.isatty() or options.as_json:
            while True:
                _print(asyncio.run(_map(server)), options)
                sys.stdout.flush()
                time.sleep(options.every_s)
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(rich_of(drawing(asyncio.run(_map(server)), _columns())), refresh=True)
                time.sleep(options.every_s)
    except KeyboardInterrupt:
        return


def _columns() -> int:
    return max(8, min(_MOST_COLUMNS, shutil.get_terminal_size((80, 24)).columns - 2))


def drawing(found: MemoryMap, columns: int) -> list[Line]:
    """The map, its legend, the measures and the host copies; at most `columns` cells a row."""
    names = [one.model for one in found.models]
    letters = {name: string.ascii_uppercase[i % 26] for i, name in enumerate(names)}
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    per_cell = max(1, -(-found.pool_pages // (columns * _ROWS)))
    page, whole = format_bytes(found.page_bytes), format_bytes(found.pool_pages * found.page_bytes)
    free = format_bytes(found.free_pages * found.page_bytes)
    lines: list[Line] = [
        (Span(f"{whole} in {found.pool_pages} pages of {page}, {free} free; a cell is {_pages(per_cell)}", "bold"),)
    ]
    cells = [_cell(run, letters, colours) for run in shown(found.runs, per_cell)]
    for first in range(0, len(cells), columns):
        lines.append(_merged(cells[first : first + columns]))
    lines.append(())
    lines += _legend(found, letters, colours)
    scratch_bytes = sum(one.bytes for one in found.totals if one.kind == "scratch")
    if scratch_bytes:
        lines.append((Span(f"{_SCRATCH} is scratch for the steps of all models: {format_bytes(scratch_bytes)}"),))
    share = found.fragmentation
    lines += [
        (),
        (Span(f"fragmentation {share.external:.1%}; were requests given neighbouring pages, {share.contiguous:.1%}"),),
        (Span(
            f"longest free run {_pages(share.longest_free_run_pages)}, "
            f"largest request {_pages(share.largest_request_pages)}"
        ),),
        (Span(
            f"host copies {format_bytes(found.host.held_bytes)} of {format_bytes(found.host.budget_bytes)}"
            + "".join(f"; {printable(one.model)} {format_bytes(one.bytes)}" for one in found.host.copies)
        ),),
    ]  # fmt: skip
    return lines


def shown(runs: Sequence[PageRun], per_cell: int) -> list[PageRun]:
    """For each cell of `per_cell` pages the holder of most of them, the first of equals. Runs are in order."""
    cells: list[PageRun] = []
    counts: dict[tuple[str | None, str], int] = {}
    filled = 0
    for run in runs:
        left = run.count
        while left:
            part = min(left, per_cell - filled)
            counts[run.model, run.kind] = counts.get((run.model, run.kind), 0) + part
            left, filled = left - part, filled + part
            if filled == per_cell:
                cells.append(_most(counts, len(cells) * per_cell))
                counts, filled = {}, 0
    if filled:
        cells.append(_most(counts, len(cells) * per_cell))
    return cells


def _most(counts: dict[tuple[str | None, str], int], first: int) -> PageRun:
    (model, kind), count = max(counts.items(), key=lambda one: one[1])
    return msgspec.convert([first, count, model, kind], PageRun)


def _cell(run: PageRun, letters: dict[str, str], colours: dict[str, str]) -> Span:
    if run.model is None:
        return Span(_FREE, "dim")
    letter, colour = letters.get(run.model, "?"), colours.get(run.model, "white")
    match run.kind:
        case "weights":
            return Span(letter, f"black on {colour}")
        case "kv":
            return Span(letter.lower(), colour)
        case _:
            return Span(_SCRATCH, colour)


def _merged(cells: Sequence[Span]) -> Line:
    """Neighbours of one style as one span."""
    spans: list[Span] = []
    for cell in cells:
        if spans and spans[-1].style == cell.style:
            spans[-1] = Span(spans[-1].text + cell.text, cell.style)
        else:
            spans.append(cell)
    return tuple(spans)


def _legend(found: MemoryMap, letters: dict[str, str], colours: dict[str, str]) -> list[Line]:
    held = {(one.model, one.kind): one.bytes for one in found.totals}
    head = ("", "MODEL", "WEIGHTS", "RUNS", "UNUSED", "KV", "UNUSED", "OLD PREFIXES")
    rows = [head]
    for one in found.models:
        letter = letters[one.model]
        rows.append((
            f"{letter}{letter.lower()}", printable(one.model),
            format_bytes(held.get((one.model, "weights"), 0)), str(one.weight_extents),
            format_bytes(one.weight_waste_bytes), format_bytes(held.get((one.model, "kv"), 0)),
            format_bytes(one.kv_waste_bytes), _pages(one.prefix_pages),
        ))  # fmt: skip
    lines = plain(rows, right=(2, 3, 4, 5, 6, 7))
    styles = ["bold", *(colours[one.model] for one in found.models)]
    return [(Span(line[:2], style), Span(line[2:])) for line, style in zip(lines, styles, strict=True)]


def _pages(count: int) -> str:
    return f"{count} page{'' if count == 1 else 's'}"
