"""`janus status`: a running server's cluster, drawn anew every second: nodes, models, applications, last decisions.

Called by `cli`. It speaks HTTP only. What was seen last stays on the screen, marked as old, while the node that is
asked does not answer; another node at the same address is asked then. `--once`, and wherever there is no terminal,
prints one picture and ends.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from yarl import URL

from janus_server.api.cluster import ClusterView
from janus_server.terminal.client import ANSWER_S, Client, Failed, Target, printable, target
from janus_server.terminal.cluster_picture import drawing
from janus_server.terminal.course import Course
from janus_server.terminal.lines import rich_of, show
from janus_server.units import format_seconds

# Lines of decisions where there is no screen that they could fill.
_DECISIONS: Final = 10


class StatusOptions(msgspec.Struct, frozen=True):
    """What the command line asked for. key and folders say where the admin key comes from."""

    url: str
    once: bool = False
    as_json: bool = False
    every_s: float = 1.0
    key: str | None = None
    folders: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"StatusOptions({self.url})"


def run(options: StatusOptions) -> int:
    try:
        live = not (options.once or options.as_json) and sys.stdout.isatty()
        view = asyncio.run(look(target(options.url, options.key, options.folders), past=live))
        if options.as_json:
            print(msgspec.json.format(msgspec.json.encode(view), indent=2).decode())
        elif not live:
            show(drawing(view, Course(), _columns(), _DECISIONS))
        else:
            _live(Watched(options, view))
        return 0
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


async def look(server: Target, past: bool = False) -> ClusterView:
    """The cluster as that node sees it, with its last minutes; it says so within `ANSWER_S`, or it has failed."""
    async with Client(server, ANSWER_S) as client:
        return await client.get("/admin/cluster", ClusterView, {"past": "true"} if past else None)


class Watched:
    """What was seen so far, and who is asked next."""

    def __init__(self, options: StatusOptions, view: ClusterView) -> None:
        self.view = view
        self.course = Course()
        self.course.recall(view)
        self.course.add(view)
        self.stale = ""
        self._options = options
        self.every_s = options.every_s
        self._url = options.url

    def look(self) -> None:
        """Once more."""
        options = self._options
        try:
            view = asyncio.run(look(target(self._url, options.key, options.folders)))
        except Failed as error:
            age_s = max(0.0, time.time() - self.view.time)
            self.stale = f"{error}; what is shown is from {format_seconds(round(age_s))} ago"
            self._url = other_url(self.view, self._url)
            return
        if view.time != self.view.time:  # else what was seen already
            self.view = view
            self.course.add(view)
        self.stale = ""


def other_url(view: ClusterView, url: str) -> str:
    """The next node at the same address: a key that was given for one host goes to no other."""
    now = URL(url if "://" in url else f"http://{url}")
    found = [
        one.url for one in view.nodes if one.url and (URL(one.url).scheme, URL(one.url).host) == (now.scheme, now.host)
    ]
    here = str(now.origin())
    return found[(found.index(here) + 1) % len(found)] if here in found else found[0] if found else url


def _live(watched: Watched) -> None:
    """Until Ctrl-C, which is how it ends well."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
        while True:
            lines = drawing(watched.view, watched.course, _columns(), 0, printable(watched.stale))
            left = max(3, console.size.height - len(lines) - 3)
            lines = drawing(watched.view, watched.course, _columns(), left, printable(watched.stale))
            live.update(rich_of(lines), refresh=True)
            time.sleep(watched.every_s)
            watched.look()


def _columns() -> int:
    return max(60, shutil.get_terminal_size((120, 40)).columns)
