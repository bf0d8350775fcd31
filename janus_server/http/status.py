"""The small routes: alive, ready, version, metrics, and which models are served."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from janus_server.api import reply
from janus_server.gauges import read
from janus_server.http.gate import may_see
from janus_server.http.service import Service, json_response, not_ready
from janus_server.metrics import CONTENT_TYPE
from janus_server.orders import Stage
from janus_server.version import server_version


class Status:
    """Handlers that read the node and change nothing."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: web.Request) -> web.Response:
        """Alive: the loop turns. Whether requests can be served is /ready."""
        return json_response({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        reason = self._service.node.ready()
        if reason is not None:
            raise not_ready(reason)
        return json_response({"status": "ready"})

    async def version(self, request: web.Request) -> web.Response:
        return json_response({"version": server_version()})

    async def metrics(self, request: web.Request) -> web.Response:
        gauges = list(read(self._service.node))
        active = [name for name, stage in self._service.node.stages().items() if stage is Stage.ACTIVE]
        for one in self._service.applications.listed:
            if one.model in active:
                self._service.metrics.application(one)
        # 100 models make 3 MB of text, which takes half a second to write.
        body = await self._service.on_thread(lambda: self._service.metrics.render(gauges, active))
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def list_models(self, request: web.Request) -> web.Response:
        """Models, then applications. A key that may use an application alone is not told its model's name."""
        entries = [self._entry(request, name) for name in self._service.names(request)]
        return json_response({"object": "list", "data": entries})

    async def show_model(self, request: web.Request) -> web.Response:
        return json_response(self._entry(request, request.match_info["model"]))

    def _entry(self, request: web.Request, name: str) -> dict[str, Any]:
        card = self._service.card(request, name)
        parent = card.id if card.id != name and may_see(request, card.id) else None
        return reply.model_entry(card, name, parent)
