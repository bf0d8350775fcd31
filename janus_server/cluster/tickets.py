"""How requests are called and dated while they travel between a front and the leader. Pure.

A ticket's name begins with that of its front, so that the leader knows where a request waits. Clocks of nodes have
nothing in common: between them a ticket carries its age instead of the time at which it came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from janus_server.orders import Traffic
from janus_server.wire.frames import Told

_SEPARATOR = ":"


def ticket_id(front: str, call: str, attempt: int) -> str:
    """Each attempt has a name of its own: what was said of those before says nothing of it."""
    return f"{front}{_SEPARATOR}{attempt}{_SEPARATOR}{call}"


def front_of(ticket: str) -> str:
    return ticket.partition(_SEPARATOR)[0]


def aged(events: Iterable[Told], now: float) -> list[Told]:
    """To be sent at `now`: times of arrival become ages."""
    return [_moved(event, lambda arrived_s: max(0.0, now - arrived_s)) for event in events]


def dated(events: Iterable[Told], now: float) -> list[Told]:
    """As they came at `now`: ages become times of arrival on this node's clock."""
    return [_moved(event, lambda age_s: now - max(0.0, age_s)) for event in events]


def _moved(event: Told, clock: Callable[[float], float]) -> Told:
    if not isinstance(event, Traffic) or not event.arrived:
        return event
    tickets = tuple(msgspec.structs.replace(one, arrived_s=clock(one.arrived_s)) for one in event.arrived)
    return msgspec.structs.replace(event, arrived=tickets)


def by_front(requests: Sequence[str]) -> dict[str, list[str]]:
    """The same tickets, those of each front together and in order."""
    found: dict[str, list[str]] = {}
    for request in requests:
        found.setdefault(front_of(request), []).append(request)
    return found
