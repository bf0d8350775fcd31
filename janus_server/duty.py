"""What an operator has a whole node do: serve, or be emptied so that it can be stopped. Frozen records.

`orders` makes them part of what the Brain hears, `sched/emptying` answers, nodes remember theirs over a change of
leader. Nothing here decides.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
NOBODY: Final = "every node is being emptied, and none takes requests: `janus drain NODE --undo` has one serve again"


class Duty(enum.Enum):
    """SERVE: it takes models and requests.

    DRAIN: it is emptied; what only it serves goes on here until it is up elsewhere. FORCE: the same, but what no other
    node has room for goes too.
    """

    SERVE = "serve"
    DRAIN = "drain"
    FORCE = "force"


class Charge(msgspec.Struct, frozen=True):
    """A node's duty, and since when: the term of the leader that an operator told it, and its number there.

    Of two the later one holds, whether the leader remembers it or the node. Nobody wished anything: (0, 0).
    """

    duty: Duty = Duty.SERVE
    since: tuple[Count, Count] = (0, 0)


class Absent(msgspec.Struct, frozen=True):
    """What a node that is gone was to do. process tells whether one that comes under its name is the same one: a node
    that was started anew serves."""

    node: str
    process: str
    charge: Charge


class EmptyingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What `sched/emptying` knows at one moment beside the duties: nodes that have not said what is up on them, those
    that are gone, when all that come together should have come, and which of them are awaited."""

    silent: tuple[str, ...] = ()
    absent: tuple[Absent, ...] = ()
    calm_s: float | None = None
    awaited: tuple[str, ...] = ()


class Awaited(msgspec.Struct, frozen=True, tag=True):
    """These nodes join at this moment: until each has reported, or for a second, nothing is planned for all of them."""

    nodes: tuple[str, ...]


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """An operator's wish for a node."""

    node: str
    duty: Duty
