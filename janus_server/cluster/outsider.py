"""Whether a node that joins belongs to those it finds: what became of its links to them tells. Pure.

`joining` asks it before the node stands for election. One that the others turned away, since it does not know their
secret, would otherwise come to lead as soon as they are gone, and turn them away when they are back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from janus_server.wire.trouble import Trouble

# What two nodes that belong together never say to each other for long.
_TURNED_AWAY: Final = frozenset({Trouble.SECRET, Trouble.DELAYED, Trouble.TLS, Trouble.CLUSTER, Trouble.VERSION})
# Nobody is to lead for so long before it gives up: those that it belongs to may only be starting.
PATIENCE_S: Final = 5.0


class Outsider:
    """What one start has seen. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._by_leader: dict[str, Trouble] = {}
        self._by_others: dict[str, Trouble] = {}
        self._linked = False
        self._since_s: float | None = None

    @property
    def barred(self) -> bool:
        """It must not stand: who led turned it away, or of those that are there some did and none is linked to."""
        return bool(self._by_leader) or (bool(self._by_others) and not self._linked)

    def look(self, links: Mapping[str, Trouble | None], leader: str | None, now_s: float) -> str | None:
        """Why this node cannot be of the cluster, once that is certain. links are the states of those to whoever is
        there, None where one is open. What a leader said holds when that is gone: until it takes this node in."""
        self._linked = None in links.values()
        self._by_others = {node: why for node, why in links.items() if why in _TURNED_AWAY}
        for node, why in links.items():
            if why is None:
                self._by_leader.pop(node, None)
        if leader is not None and (why := self._by_others.get(leader)) is not None:
            self._by_leader[leader] = why
        if leader is not None or not self.barred:
            self._since_s = None
        else:
            self._since_s = self._since_s or now_s
        found = {**self._by_others, **self._by_leader}
        if leader is not None and found.get(leader) in (Trouble.SECRET, Trouble.CLUSTER):
            return f"node {leader}, which leads, cannot be linked to: {found[leader].sentence}"
        if self._since_s is not None and now_s - self._since_s > PATIENCE_S:
            node, why = min(found.items())
            return f"node {node} cannot be linked to, and nobody leads: {why.sentence}"
        return None
