"""Both sides of a request whose prompt is computed by another node than the one that runs it, once models are open.

`member` makes one and sends every request that begins on this node through it. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from janus_server.cluster.arrivals import Arrivals
from janus_server.cluster.lending import Lending
from janus_server.cluster.prefill import Prefills
from janus_server.types import HandedOver

if TYPE_CHECKING:
    from janus_server.cluster.hosting import Hosting
    from janus_server.executor import Cancel, Submit
    from janus_server.orders import Helper
    from janus_server.wire.link import Link


class Handover:
    """Of one node. A request passes `post`, what was computed for others leaves by `lending`."""

    def __init__(
        self, hosting: Hosting, link: Callable[[str], Link | None], work_s: Callable[[str, int], float],
        term: Callable[[], int],
    ) -> None:  # fmt: skip
        """link(node) is the link to it, work_s(model, tokens) predicts what a prompt takes, term() is the leader's."""
        paging, lifecycle = hosting.paging, hosting.lifecycle
        device, scarcity, xtensor = paging.device, paging.scarcity, paging.xtensor
        self.lending = Lending(device, scarcity, xtensor, paging.table, lifecycle.grants, term)
        self._residents = lifecycle.residents
        self.prefills: Prefills | None = None
        if hosting.peering is not None:
            self.prefills = Prefills(
                lifecycle.residents, Arrivals(device, scarcity, xtensor), paging.table, xtensor.page_bytes,
                hosting.peering, link, work_s,
            )  # fmt: skip

    def post(self, command: Submit | Cancel, helper: Helper | None = None) -> None:
        """Run a request here, with what a helper has of its prompt; or end one."""
        if self.prefills is None:
            self._residents[command.model].flow.device.post(command)
        else:
            self.prefills.post(command, helper)

    def counts(self) -> HandedOver:
        return HandedOver() if self.prefills is None else self.prefills.counts

    async def close(self) -> None:
        if self.prefills is not None:
            await self.prefills.close()
