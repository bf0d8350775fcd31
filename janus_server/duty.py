"""What an operator has a whole node do: serve, or be emptied so that it can be stopped. Frozen records.

`orders` makes them part of what the Brain hears, `sched/emptying` answers, nodes remember theirs over a change of
leader. Nothing here decides.
"""

from __future__ import annotations

import enum

import msgspec


class Duty(enum.Enum):
    """SERVE: it takes models and requests.

    DRAIN: it is emptied; what only it serves goes on here until it is up elsewhere. FORCE: the same, but what no other
    node has room for goes too.
    """

    SERVE = "serve"
    DRAIN = "drain"
    FORCE = "force"


class Assigned(msgspec.Struct, frozen=True, tag=True):
    """An operator's wish for a node."""

    node: str
    duty: Duty
