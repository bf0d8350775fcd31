"""Transfers that share links: each gets as much as the others leave it (max-min), anew when one begins or ends.

`carrying` begins one for every copy of weights. A link is any hashable name with a capacity in bytes a second; a
transfer crosses several at once. Only those that share links with what changed are looked at, directly or over others.
It knows no models and no nodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence

from janus_server.errors import require

# What is left of a transfer when its end comes is a matter of rounding; nothing smaller than a byte is.
_ROUNDING_BYTES = 1.0


class Transfer:
    """size_bytes over all of `links` at once; `rate` is what it gets at present, `thing` whose it is."""

    __slots__ = ("ends_s", "left_bytes", "links", "rate", "since_s", "thing")

    def __init__(self, thing: object, size_bytes: float, links: tuple[Hashable, ...], now: float) -> None:
        self.thing, self.left_bytes, self.links = thing, size_bytes, links
        self.rate, self.since_s, self.ends_s = 0.0, now, now


class Links:
    """capacity(link) says what a link carries, in bytes a second; it is asked once for each."""

    def __init__(self, capacity: Callable[[Hashable], float]) -> None:
        self._capacity_of = capacity
        self._capacity: dict[Hashable, float] = {}
        self._on: dict[Hashable, dict[Transfer, None]] = {}
        self._ends: list[tuple[float, int, Transfer]] = []
        self._number = 0

    def begin(self, thing: object, size_bytes: float, links: Sequence[Hashable], now: float) -> Transfer:
        transfer = Transfer(thing, max(size_bytes, 0.0), tuple(dict.fromkeys(links)), now)
        require(bool(transfer.links), "a transfer crosses no link")
        for link in transfer.links:
            if link not in self._capacity:
                capacity = self._capacity_of(link)
                require(capacity > 0.0, f"link {link} carries nothing")
                self._capacity[link] = capacity
            self._on.setdefault(link, {})[transfer] = None
        self._share(transfer.links, now)
        return transfer

    def cancel(self, transfer: Transfer, now: float) -> None:
        """It is given up; one that has ended already is nobody's."""
        if transfer in self._on.get(transfer.links[0], {}):
            self._remove(transfer, now)

    def next_s(self) -> float | None:
        """When the next one ends, unless others begin before."""
        while self._ends and not self._valid(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else None

    def ended(self, now: float) -> list[Transfer]:
        """Those that have ended by now, in order; they are forgotten."""
        over: list[Transfer] = []
        while (due_s := self.next_s()) is not None and due_s <= now:
            transfer = heapq.heappop(self._ends)[2]
            self._remove(transfer, due_s)
            over.append(transfer)
        return over

    def out_rate(self, link: Hashable) -> float:
        """Bytes a second that cross a link now."""
        return sum(transfer.rate for transfer in self._on.get(link, ()))

    def _valid(self, entry: tuple[float, int, Transfer]) -> bool:
        transfer = entry[2]
        return transfer.ends_s == entry[0] and transfer in self._on.get(transfer.links[0], {})

    def _remove(self, transfer: Transfer, now: float) -> None:
        for link in transfer.links:
            del self._on[link][transfer]
            if not self._on[link]:
                del self._on[link]
        self._share(transfer.links, now)

    def _together(self, links: Sequence[Hashable]) -> dict[Transfer, None]:
        """All transfers that share a link with these, directly or over others."""
        found: dict[Transfer, None] = {}
        seen, todo = set(links), list(links)
        while todo:
            for transfer in self._on.get(todo.pop(), ()):
                if transfer not in found:
                    found[transfer] = None
                    todo += [link for link in transfer.links if link not in seen]
                    seen.update(transfer.links)
        return found

    def _share(self, links: Sequence[Hashable], now: float) -> None:
        """Fill the links evenly: the one that is full first settles what its transfers get, then the next."""
        open_ = self._together(links)
        room = {link: self._capacity[link] for transfer in open_ for link in transfer.links}
        count = dict.fromkeys(room, 0)
        for transfer in open_:
            for link in transfer.links:
                count[link] += 1
        while open_:
            tight = min((link for link in count if count[link]), key=lambda link: room[link] / count[link])
            rate = max(room[tight], 0.0) / count[tight]
            for transfer in [transfer for transfer in self._on[tight] if transfer in open_]:
                del open_[transfer]
                for link in transfer.links:
                    room[link] -= rate
                    count[link] -= 1
                self._set(transfer, rate, now)

    def _set(self, transfer: Transfer, rate: float, now: float) -> None:
        if transfer.rate > 0.0 and rate == transfer.rate:
            return
        transfer.left_bytes = max(0.0, transfer.left_bytes - transfer.rate * (now - transfer.since_s))
        transfer.since_s, transfer.rate = now, rate
        rest = 0.0 if transfer.left_bytes < _ROUNDING_BYTES else transfer.left_bytes / max(rate, 1e-9)
        transfer.ends_s = now + rest
        self._number += 1
        heapq.heappush(self._ends, (transfer.ends_s, self._number, transfer))
