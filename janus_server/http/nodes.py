"""The routes of who runs the nodes of a cluster: to empty one so that it can be stopped, and to use it again.

Any node takes them, and the leader answers. Like the wishes for models they are answered at once: how far it is stands
in /admin/cluster, and asking again does no harm.
"""

from __future__ import annotations

from aiohttp import web

from janus_server.api.admin import AdminError
from janus_server.api.nodes import NodeDuty
from janus_server.api.openapi import About, Access
from janus_server.duty import Assigned, Duty
from janus_server.http.admin import answered, told, truth
from janus_server.http.routes import Routes
from janus_server.http.service import Service, not_ready


class Nodes:
    """The handlers under /admin/nodes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def drain(self, request: web.Request) -> web.Response:
        """409 where only this node serves a model that no other one has room for, unless it is forced."""
        force = truth(request, "force")
        return await self._assign(request, Duty.FORCE if force else Duty.DRAIN)

    async def serve(self, request: web.Request) -> web.Response:
        return await self._assign(request, Duty.SERVE)

    async def _assign(self, request: web.Request, duty: Duty) -> web.Response:
        operator = self._service.node.operator
        if operator is None:
            raise not_ready("the models are not known yet")
        node = request.match_info["node"]
        answer = await operator.ask_leader(Assigned(node, duty))
        if answer.accepted:
            return answered(NodeDuty(node=node, duty=duty.value, why=answer.why))
        return told(request, 409, "conflict", answer.why)


def add_nodes(routes: Routes, handlers: Nodes) -> None:
    routes.add_post("/admin/nodes/{node}/drain", handlers.drain, About(
        tag="admin", summary="Empty a node, so that it can be stopped",
        details="What only it serves is brought up on other nodes first; then it takes no new requests, finishes those "
        "that it has and lets go of its models. 409 with the models' names where no other node has room for them. "
        "/admin/cluster shows how far it is; asking twice does no harm",
        query=(("force", "true: what no other node has room for goes too"),),
        answer=NodeDuty, error=AdminError, statuses=(409,), access=Access.ADMIN,
    ))  # fmt: skip
    routes.add_post("/admin/nodes/{node}/serve", handlers.serve, About(
        tag="admin", summary="Use a node again that was emptied, or is being so",
        answer=NodeDuty, error=AdminError, statuses=(409,), access=Access.ADMIN,
    ))  # fmt: skip
