"""Which links an order moves its bytes over, and what it takes beyond that: paths through the imaginary cluster.

`carrying` asks it for every order. The speeds are those of `constants`; nothing is measured or decided here.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import NamedTuple

from janus_server.errors import require
from janus_server.orders import Order, Verb
from janus_server.sched.source import Link, Links

from .physics import shard_bytes
from .records import ModelSpec, NodeSpec


class Way(NamedTuple):
    """fixed_s pass before size_bytes begin to move over all of `links` at once."""

    fixed_s: float
    size_bytes: float
    links: tuple[Hashable, ...]


class Ways:
    """Links are named (kind, path, node or host): `one` device's part of a path, and `all` that its sharers get.

    A node's memory is read by copies to others over one link ("out"), whatever path they take.
    """

    def __init__(self, models: Mapping[str, ModelSpec], links: Links) -> None:
        self._models = models
        self._paths: dict[str, Link] = {"near": links.near, "far": links.far, "host": links.host, "disk": links.disk}

    def of(self, order: Order, node: NodeSpec, source: NodeSpec | None) -> Way:
        """SLEEP goes the way of WAKE backwards: host links carry as much in either direction, apart."""
        spec = self._models[order.model]
        size_bytes = shard_bytes(spec)
        host = node.host or node.name
        match order.verb:
            case Verb.FORK:
                require(source is not None, f"order {order.id} forks from nobody")
                path = "near" if source is not None and source.domain == node.domain else "far"
                shared = self._shared(path, host)
                links = (self.out(order.source or ""), ("one", path, node.name), *shared)
            case Verb.WAKE:
                path, links = "host", (("one", "host", node.name), *self._shared("host", host))
            case Verb.SLEEP:
                path, links = "host", (("one", "host", f"{node.name} back"), *self._shared("host", f"{host} back"))
            case _:
                path, links = "disk", (("one", "disk", node.name), *self._shared("disk", host))
        fixed_s = 0.0 if order.verb is Verb.SLEEP else self._paths[path].fixed_s
        return Way(fixed_s, size_bytes, links)

    def out(self, node: str) -> Hashable:
        """The link over which a node's memory is read."""
        return "one", "near", f"{node} out"

    def capacity(self, link: Hashable) -> float:
        """In bytes a second."""
        require(isinstance(link, tuple), f"there is no link {link}")
        kind, path, _ = link if isinstance(link, tuple) else ("", "", "")
        found = self._paths[path]
        return found.bytes_s if kind == "one" or found.shared_bytes_s is None else found.shared_bytes_s

    def _shared(self, path: str, host: str) -> tuple[Hashable, ...]:
        return () if self._paths[path].shared_bytes_s is None else (("all", path, host),)
