"""Registration of routes together with what they are for, so that /openapi.json can tell of each one that exists.

`app` hands a `Routes` to the functions that join handlers to paths. It keeps no list of paths of its own: what is told
is what aiohttp's router holds, and a test refuses a route that nobody described.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from janus_server.api.openapi import About, Operation

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    """A router that remembers the `About` of what was added through it."""

    def __init__(self, router: web.UrlDispatcher) -> None:
        self._router = router
        self._abouts: dict[web.AbstractRoute, About] = {}

    def add_get(self, path: str, handler: Handler, about: About | None = None) -> None:
        self._note(self._router.add_get(path, handler), about)

    def add_post(self, path: str, handler: Handler, about: About | None = None) -> None:
        self._note(self._router.add_post(path, handler), about)

    def add_delete(self, path: str, handler: Handler, about: About | None = None) -> None:
        self._note(self._router.add_delete(path, handler), about)

    def operations(self) -> tuple[Operation, ...]:
        """Every route of the application, described or not; HEAD goes with its GET."""
        return tuple(
            Operation(route.method, route.resource.canonical, self._abouts.get(route))
            for route in self._router.routes()
            if route.method != hdrs.METH_HEAD and route.resource is not None
        )

    def _note(self, route: web.AbstractRoute, about: About | None) -> None:
        if about is not None:
            self._abouts[route] = about
