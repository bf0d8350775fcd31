"""Which node holds the start of which prompt, as far as nodes have told, and what a prompt takes there. Pure.

Prompts are known by keys alone (`cluster/prefixes` makes them): one for each block of tokens, which stands for that
block and all before it. `Holders` is the dispatcher's; what it has not heard of costs a worse choice and nothing else,
since a node compares the tokens themselves before it uses what it has cached.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from janus_server.orders import Ticket

# What the leader believes of one node at most, whatever that says: 64 bytes each.
MOST_BELIEVED: Final = 1 << 15


class PrefixKey(msgspec.Struct, frozen=True, array_like=True):
    """The first `tokens` of a prompt, and all that whoever decides is to know of them."""

    tokens: int
    key: int


class Cached(msgspec.Struct, frozen=True, tag=True):
    """Prefixes that a node's caches hold: what came and what went since it was last told. afresh: forget all before."""

    node: str
    came: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    afresh: bool = False


class Holders:
    """What each node has told of its caches.

    Example: after hear(Cached("n1", (7, 8))), a prompt of 200 tokens with the keys (64, 7), (128, 8), (192, 9) finds
    128 of them cached on n1 and none on n2.
    """

    def __init__(self, known: Mapping[str, Iterable[int]] | None = None) -> None:
        self._held: dict[str, set[int]] = {node: set(keys) for node, keys in (known or {}).items()}
        self.changes = 0

    def memory(self) -> dict[str, frozenset[int]]:
        """What it knows now, as a copy."""
        return {node: frozenset(keys) for node, keys in self._held.items()}

    def __bool__(self) -> bool:
        """False while nothing is known that could make a difference."""
        return any(self._held.values())

    def hear(self, held: Cached) -> None:
        keys = self._held.setdefault(held.node, set())
        if held.afresh:
            keys.clear()
        keys.difference_update(held.gone)
        keys.update(held.came[: max(0, MOST_BELIEVED - len(keys))])
        self.changes += 1

    def gone(self, node: str) -> None:
        """The node is gone, and its caches with it."""
        if self._held.pop(node, None) is not None:
            self.changes += 1

    def cached(self, prefix: tuple[PrefixKey, ...], nodes: Iterable[str]) -> dict[str, int]:
        """How many tokens of a prompt with these keys, the shortest first, are cached on each node that has any.

        Who holds a prefix holds the shorter ones too, so that a few looks find the longest.
        """
        found = {}
        for node in nodes:
            held = self._held.get(node)
            if held and prefix:
                known = bisect.bisect_left(prefix, True, key=lambda one: one.key not in held)
                if known:
                    found[node] = prefix[known - 1].tokens
        return found


class Shortcuts:
    """Where a prompt that waits takes less than its `work_s`, found once until a node tells of other prefixes."""

    def __init__(self, known: Mapping[str, Iterable[int]] | None = None) -> None:
        self.holders = Holders(known)
        self._found: dict[str, tuple[int, tuple[str, ...], dict[str, float]]] = {}

    def __bool__(self) -> bool:
        return bool(self.holders)

    def work_s(self, ticket: Ticket, nodes: Sequence[str]) -> dict[str, float]:
        """Seconds on those of the nodes that hold the start of its prompt."""
        asked, found = tuple(nodes), self._found.get(ticket.id)
        if found is not None and found[:2] == (self.holders.changes, asked):
            return found[2]
        work = {node: _left_s(ticket, tokens) for node, tokens in self.holders.cached(ticket.prefix, asked).items()}
        if ticket.prefix:
            self._found[ticket.id] = self.holders.changes, asked, work
        return work

    def on(self, ticket: Ticket, node: str) -> float:
        """Seconds on one node."""
        tokens = self.holders.cached(ticket.prefix, (node,)).get(node, 0) if ticket.prefix else 0
        return _left_s(ticket, tokens)

    def forget(self, request: str) -> None:
        """It does not wait any more."""
        self._found.pop(request, None)


def work_left_s(work_s: float, least_s: float, prompt_tokens: int, cached_tokens: int) -> float:
    """What a prompt takes of which so many tokens are cached: of work_s, between all for none and least_s for the last
    token alone, which is always computed.

    Example: 1.0 s for 101 tokens and 0.1 s for one; with 50 of them cached 0.55 s.
    """
    if cached_tokens <= 0 or prompt_tokens <= 1:
        return work_s
    least_s = least_s if 0.0 <= least_s <= work_s else 0.0
    share = min(cached_tokens, prompt_tokens - 1) / (prompt_tokens - 1)
    return work_s - (work_s - least_s) * share


def _left_s(ticket: Ticket, cached_tokens: int) -> float:
    return work_left_s(ticket.work_s, ticket.least_s, ticket.prompt_tokens, cached_tokens)
