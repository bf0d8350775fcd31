"""/dashboard: the page that shows the cluster to its operators, on every node.

The page holds no data: it asks /admin/cluster with the key that is typed into it, so it is given to whoever asks. Its
parts lie in `janus_server/dashboard` and are put into one document when it is first asked for; like /docs it may run
and fetch nothing but what is its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiohttp import web

from janus_server.http.docs import Page, sealed, shown
from janus_server.http.service import Service

FOLDER: Final = Path(__file__).parents[1] / "dashboard"
# In this order: what a script uses when it is run stands before it.
SCRIPTS: Final = (
    "base.js", "history.js", "feed.js", "charts.js", "actions.js", "nodes.js", "models.js", "applications.js",
    "decisions.js", "main.js",
)  # fmt: skip


class Dashboard:
    """The handler of the page."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._page: Page | None = None

    async def page(self, request: web.Request) -> web.Response:
        if self._page is None:  # two that ask at once make the same bytes
            self._page = await self._service.on_thread(read_dashboard)
        return shown(self._page)


def read_dashboard() -> Page:
    """The packaged parts as one document, with a policy made of what is in it."""
    script = b"\n".join([b'"use strict";', *((FOLDER / name).read_bytes() for name in SCRIPTS)])
    body = (FOLDER / "page.html").read_bytes()
    body = body.replace(b"@STYLE@", (FOLDER / "page.css").read_bytes()).replace(b"@SCRIPT@", script)
    return sealed(body)
