"""A node's way into its cluster: until its leader knows it and the models of the start are served. `member` waits here.

A node stands for election once its leader has taken it in, or where there is nobody to take it in: one with other
models or another secret than the rest must not come to lead them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from janus_server.cluster.meeting import Meeting
from janus_server.cluster.outsider import Outsider
from janus_server.errors import BadConfig
from janus_server.wire.frames import Role, Table
from janus_server.wire.trouble import Trouble

log = logging.getLogger("janus.cluster")

# How long a start waits for models that somebody is to load, once its leader knows it.
_MODELS_S: Final = 15.0
# Others that could lead do so well within that time.
_VACANT_S: Final = 1.0
_LOOK_S: Final = 0.02


async def joined(
    meeting: Meeting, awaited: Sequence[str], table: Callable[[], Table | None], refused: Callable[[], str]
) -> None:
    """awaited are models that are to be loaded at start, table() is what the leader said last, refused() why it does
    not take this node in: then that is a BadConfig.
    """
    standing, outsider = False, Outsider()
    vacant_s = taken_s = None
    while True:
        await asyncio.sleep(_LOOK_S)
        now, said = time.monotonic(), table()
        leader = meeting.view.leader
        known = said is not None and meeting.node in said.nodes
        strange = outsider.look(_links(meeting), None if leader is None else leader.name, now)
        if why := refused() or meeting.foreign() or (None if known else strange):
            raise BadConfig(why)
        vacant_s = None if leader is not None else vacant_s or now
        free = vacant_s is not None and not outsider.barred and _may_stand(meeting, now - vacant_s)
        if not standing and (known or free):
            standing = True
            meeting.stand()
        if said is None or not known:
            continue
        taken_s = taken_s or now
        missing = [model for model in awaited if not said.routes.get(model)]
        resting = [model for model in missing if model in said.resting]
        if missing == resting or now - taken_s > _MODELS_S:
            if resting:
                log.info("not loaded at start, there is no room beside the others: %s", ", ".join(resting))
            return


def _links(meeting: Meeting) -> dict[str, Trouble | None]:
    """How those to the others are."""
    links = {name: meeting.link(name) for name in meeting.names()}
    return {name: link.state(Role.CONTROL) for name, link in links.items() if link is not None}


def _may_stand(meeting: Meeting, vacant_s: float) -> bool:
    """Where nobody leads: at once where nobody ever did or where this node is alone, else when nobody else will."""
    there = meeting.names()
    if meeting.node not in there:  # what the coordinator knows is not read yet
        return False
    return there == [meeting.node] or meeting.view.term == 0 or vacant_s > _VACANT_S
