"""Joining a cluster that meets in a stock etcd, which does the consensus of several hosts. `etcdsession` does the rest.

Called by the shells of the cluster through `base`. Whatever keeps a node from joining ends as a BadConfig that says
what to do, after as much patience as servers that start later and leases of dead namesakes deserve.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import Final

from janus_server.coordinator.base import Clock, Trouble, boot_clock
from janus_server.coordinator.etcdkeys import Keys
from janus_server.coordinator.etcdsession import EtcdSession, NameTaken
from janus_server.coordinator.gateway import Barred, Gateway, Login, NotEtcd, Untrusted
from janus_server.coordinator.lease import LEAST_LEASE_S, MOST_LEASE_S, renew_s
from janus_server.coordinator.records import Member, check_member
from janus_server.errors import BadConfig

# How long a name may stay taken by a registration whose process is gone, beyond its lease: servers look for ended
# leases twice a second, and after an election of theirs every lease begins anew.
_SLACK_S: Final = 2.0
_POLL_S: Final = 0.25


class EtcdCoordinator:
    """One cluster of one etcd."""

    def __init__(
        self,
        endpoints: Sequence[str],
        cluster: str,
        *,
        lease_s: float = 3.0,
        tls: ssl.SSLContext | None = None,
        login: Login | None = None,
        clock: Clock = boot_clock,
        patience_s: float = 10.0,
    ) -> None:
        """lease_s is asked for in whole seconds, and the server may grant more. patience_s: how long a server is waited
        for that does not answer yet."""
        if not LEAST_LEASE_S <= lease_s <= MOST_LEASE_S:
            raise BadConfig(f"the lease must last from {LEAST_LEASE_S} to {MOST_LEASE_S:.0f} s")
        self._endpoints = tuple(endpoints)
        self._keys = Keys(cluster)
        self._lease_s = max(1, round(lease_s))
        self._tls = tls
        self._login = login
        self._clock = clock
        self._patience_s = patience_s

    async def join(self, member: Member) -> EtcdSession:
        gateway = Gateway(self._endpoints, self._tls, renew_s(self._lease_s), self._login)
        session = EtcdSession(gateway, self._keys, check_member(member), self._lease_s, self._clock)
        try:
            await self._registered(session, member.name)
        except BaseException:
            await session.close()
            raise
        return session

    async def _registered(self, session: EtcdSession, name: str) -> None:
        """Register, and wait for a server to answer and for a dead namesake's lease to end."""
        began_s = self._clock()
        while True:
            try:
                await session.start()
                return
            except Barred as trouble:
                raise BadConfig(str(trouble)) from None
            except (NotEtcd, Untrusted) as trouble:
                raise BadConfig(f"{trouble}; see what --join names") from None
            except NameTaken:
                patience_s = session.granted_s + _SLACK_S
                why = f"a node named {name} is in the cluster already; give this one another name"
            except Trouble as trouble:
                patience_s = self._patience_s
                why = f"{trouble} where --join says; is it running, and does it want TLS (etcds://)?"
            if self._clock() - began_s >= patience_s:
                raise BadConfig(why)
            await asyncio.sleep(_POLL_S)
