"""A node's pages for nodes of other hosts, and the way to theirs: its door, and who is known to have one.

`meeting` makes one, tells its address to the coordinator and what that says of others back to here; `member` opens the
door once the node's models are there. Loopback needs no TLS, everything beyond it does, as for the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from janus_server.coordinator.records import Member
from janus_server.transfer.door import Door, Pages
from janus_server.transfer.frames import PeerTrouble
from janus_server.transfer.line import Line
from janus_server.transfer.proving import dial, endpoint_of
from janus_server.transfer.rundir import Far, Peering
from janus_server.wire.handshake import Identity, Secret
from janus_server.wire.listen import bind
from janus_server.wire.tls import TlsFiles, answering_context, dialling_context, own_digest


class Known(NamedTuple):
    """A member whose pages can be reached."""

    near: bool
    dial: Callable[[float], Line]


class Freight:
    """Its port is bound from the beginning, and answered at from `open` to `close`."""

    def __init__(self, cluster: str, node: str, process: str, host: str, secret: Secret, tls: TlsFiles | None) -> None:
        """BadConfig where others could read along, or the port cannot be had."""
        self._listening = bind(host, 0, tls is not None)
        self.endpoint = endpoint_of(host, self._listening.getsockname()[1], tls is not None)
        self._me = Identity(cluster, node, process, self.endpoint)
        self._secret = secret
        self._answering = None if tls is None else answering_context(tls)
        self._dialling = None if tls is None else dialling_context(tls)
        self._certificate = b"" if tls is None else own_digest(tls)
        self._door: Door | None = None

    def open(self, peering: Peering, pages: Pages) -> None:
        """Let the pages be read by whoever belongs to the cluster and has a grant."""
        self._door = Door(self._listening, self._me, self._secret, peering, pages, self._answering, self._certificate)

    def known(self, member: Member | None, machine: str) -> Far | None:
        """How the member is reached from a node of that machine; None where it is no member, or lets nobody read."""
        if member is None or not member.pages:
            return None
        peer = Identity(self._me.cluster, member.name, member.process, member.pages)

        def reach(limit_s: float) -> Line:
            if self._door is None:
                raise PeerTrouble("this node belongs to its cluster no more")
            return dial(self._me, peer, self._secret, self._dialling, limit_s)

        return Known(bool(machine) and member.host == machine, reach)

    async def close(self) -> None:
        if self._door is not None:
            door, self._door = self._door, None
            await door.close()
        else:
            self._listening.close()
