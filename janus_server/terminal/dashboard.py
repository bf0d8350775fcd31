"""`janus dashboard`: the address of a running server's dashboard, with the key that opens it.

Called by `cli_admin`. The key stands behind the # of the address: a browser keeps that to itself and sends it to
nobody, and the page takes it out of the address bar at once. The server is only asked whether the key opens it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from urllib.parse import quote

import msgspec

from janus_server.terminal.client import Failed, Target, target
from janus_server.terminal.status import look


class DashboardOptions(msgspec.Struct, frozen=True):
    """What the command line asked for. key and folders say where the admin key comes from."""

    url: str
    key: str | None = None
    folders: tuple[Path, ...] = ()

    def __repr__(self) -> str:
        return f"DashboardOptions({self.url})"


def run(options: DashboardOptions) -> int:
    try:
        server = target(options.url, options.key, options.folders)
        asyncio.run(look(server))  # whether the key opens it: better said here than in the browser
    except Failed as error:
        print(f"janus: {error}", file=sys.stderr)
        return 1
    print(address(server))
    return 0


def address(server: Target) -> str:
    """Where a browser finds it, the key behind the #."""
    page = str(server.url.with_path("/dashboard"))
    return page if server.key is None else f"{page}#key={quote(server.key, safe='')}"
