"""What a coordinator does for a node: membership, the election of a leader, and nothing else. Two kinds do it.

`local` is one host and its run directory, `etcd` several hosts. The shells of the cluster see only these protocols. The
coordinator never judges orders and never carries requests; losing it takes nothing from a node but the right to lead.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from janus_server.coordinator.records import Change, Leadership, Member, View

Clock = Callable[[], float]


class Trouble(Exception):
    """The coordinator cannot be used at the moment: a fixed sentence. Only `join` lets one out, as a BadConfig."""


class Session(Protocol):
    """One node's place in the cluster, from join to close. Lives on the loop that joined.

    Whatever the coordinator suffers, a session keeps its last view, tries again by itself, and never raises.
    """

    @property
    def member(self) -> Member:
        """This node as it is registered now: its incarnation changes when others may have thought it gone."""

    @property
    def view(self) -> View: ...

    def observe(self) -> AsyncIterator[Change]:
        """What there is, as changes, then whatever changes. A slow reader gets fewer and larger steps. Ends with the
        session."""

    def campaign(self) -> None:
        """Stand for election from now on, again after every defeat."""

    def leadership(self) -> Leadership | None:
        """The right to lead, if this node has it at this very moment. To be asked before every order: it ends by
        itself, also while the process is stopped."""

    async def resign(self) -> None:
        """Stop standing, and hand the leadership back at once."""

    async def close(self) -> None:
        """Leave: others see it at once."""


class Coordinator(Protocol):
    async def join(self, member: Member) -> Session:
        """Register. BadConfig where another living node has the name, or where there is nothing to register with."""


def boot_clock() -> float:
    """Seconds since the machine started. Unlike time.monotonic it counts while the machine is suspended, as the lease
    does that others see."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
