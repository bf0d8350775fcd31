"""What the Brain believes of a node that has just said what there is on it. Pure; `brain` asks when one joins."""

from __future__ import annotations

from collections.abc import Callable

from janus_server.duty import Duty
from janus_server.orders import Joined
from janus_server.sched.state import Belief, RoomMemory, pages_needed


def newcomer(event: Joined, now: float, held: Callable[[str], bool]) -> RoomMemory:
    """What it is to load at start is wanted from now on, as far as it fits beside what is before it in the catalogue,
    and no other node has it: held(model).
    """
    beliefs = tuple(Belief.of(known, now) for known in event.models)
    chosen: list[Belief] = []
    for belief in beliefs:
        name, known = belief.known.model, belief.known
        belief.offers = event.offers.get(name, ())
        lacking = known.preload and known.shards == 1 and not held(name)
        if lacking and event.duty is Duty.SERVE and pages_needed([*chosen, belief]) <= event.pool_pages:
            belief.wanted_s = now
            chosen.append(belief)
    return RoomMemory(
        node=event.node, pool_pages=event.pool_pages, host_bytes=event.host_bytes, models=beliefs, host=event.host,
        domain=event.domain, duty=event.duty, since=event.since, process=event.process,
    )  # fmt: skip
