"""/openapi.json and /docs: what the API is, for programs and for people.

Both are made once, when first asked for, and kept as bytes. The page is one file without a word from elsewhere; its
Content-Security-Policy names the hashes of its own script and style, so nothing else could run in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from janus_server.api import openapi
from janus_server.api.openapi import Operation
from janus_server.errors import require
from janus_server.http.service import Service
from janus_server.version import server_version

PAGE = Path(__file__).with_name("docs.html")


class Page(msgspec.Struct, frozen=True):
    """A page and the policy that a browser must hold it to."""

    body: bytes
    policy: str


class Docs:
    """The handlers of both. `operations` is asked when the first request comes: every route is registered by then."""

    def __init__(self, service: Service, operations: Callable[[], tuple[Operation, ...]]) -> None:
        self._service = service
        self._operations = operations
        self._document: bytes | None = None
        self._page: Page | None = None

    async def document(self, request: web.Request) -> web.Response:
        if self._document is None:  # two that ask at once make the same bytes
            self._document = await self._service.on_thread(self._make)
        return web.Response(body=self._document, content_type="application/json")

    async def page(self, request: web.Request) -> web.Response:
        if self._page is None:
            self._page = await self._service.on_thread(read_page)
        return shown(self._page)

    def _make(self) -> bytes:
        return openapi.encode(openapi.document(self._operations(), server_version(), self._service.limits))


def read_page() -> Page:
    """The packaged page, with its policy."""
    return sealed(PAGE.read_bytes())


def shown(page: Page) -> web.Response:
    """The answer that carries a page and holds a browser to its policy."""
    headers = {
        "Content-Security-Policy": page.policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=page.body, content_type="text/html", charset="utf-8", headers=headers)


def sealed(body: bytes) -> Page:
    """A page with a policy made of what is in it: no other script or style, and nothing from elsewhere."""
    scripts, styles = _hashes(body, b"script"), _hashes(body, b"style")
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(body, policy)


def _hashes(page: bytes, tag: bytes) -> str:
    """The hashes of the page's elements of that name, as a policy lists them."""
    contents = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    require(bool(contents), "the page has lost its script or its style")
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in contents)
