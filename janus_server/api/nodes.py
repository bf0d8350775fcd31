"""What the routes under /admin/nodes answer. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec


class NodeDuty(msgspec.Struct, kw_only=True):
    """A wish for a node that was accepted: what it does from now on, and what comes of it."""

    node: str
    duty: Literal["serve", "drain", "force"]
    why: str
