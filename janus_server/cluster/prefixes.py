"""Prefix keys: names for the starts of prompts that travel in their stead, and which of them this node's caches hold.

A key is a hash over a block of tokens and all before it, keyed with the cluster's secret and begun anew for each model
and tenant: nobody without the secret can tell what it stands for or make one, and one tenant's keys are never
another's. It does not depend on how many tokens a page holds. The front puts the keys of a prompt into its ticket, and
the member tells the leader of those that came and went (`sched/prefixes`). The device thread writes to a `Trail`;
everything else here lives on the loop. Nothing is decided here, and what is wrong here makes no answer wrong.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from janus_server.sched.prefixes import Cached, PrefixKey
from janus_server.types import Request

BLOCK_TOKENS: Final = 64
# Of longer prompts no more than the beginning counts: hashing it takes a millisecond.
MOST_BLOCKS: Final = 512
# In a ticket, evenly spread over the prompt: half a kilobyte.
MOST_KEYS: Final = 32
# What a node tells of its caches: a million tokens. Beyond that the newest are not told of.
MOST_HELD: Final = 1 << 14
# At once: 40 KB of what came, and as much of what went.
MOST_TOLD: Final = 1 << 12
_KEY_BITS: Final = 63


class Keys:
    """Makes the keys of one cluster. secret() is asked for once a model and tenant."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._roots: dict[tuple[str, str], bytes] = {}

    def root(self, model: str, tenant: str) -> bytes:
        """Where the keys of a tenant's prompts begin. Tenants are few: each is a key of the configuration."""
        link = self._roots.get((model, tenant))
        if link is None:
            word = f"{len(model)}:{model}{tenant}".encode("utf-8", "surrogateescape")
            link = hashlib.blake2b(word, key=self._secret(), digest_size=16).digest()
            self._roots[model, tenant] = link
        return link

    def of(self, request: Request) -> tuple[PrefixKey, ...]:
        """Of the start of its prompt, the shortest first; none where a cache would be of no use to it."""
        if request.prompt_logprobs is not None or request.pooling is not None:
            return ()
        blocks = min(MOST_BLOCKS, (len(request.prompt) - 1) // BLOCK_TOKENS)  # the last token is always computed
        step = max(1, -(-blocks // MOST_KEYS))
        link, data = self.root(request.model, request.tenant), array("I", request.prompt[: blocks * BLOCK_TOKENS])
        packed, size = memoryview(data).cast("B"), BLOCK_TOKENS * data.itemsize
        keys = []
        for block in range(1, blocks + 1):
            link = follow(link, packed[(block - 1) * size : block * size])
            if block % step == 0 or block == blocks:
                keys.append(PrefixKey(block * BLOCK_TOKENS, key_of(link)))
        return tuple(keys)


def follow(link: bytes, block: bytes | memoryview) -> bytes:
    """One block further. The links themselves stay here, and they begin with what only the cluster knows."""
    return hashlib.blake2b(block, key=link, digest_size=16).digest()


def key_of(link: bytes) -> int:
    return int.from_bytes(link[:8], "little") >> (64 - _KEY_BITS)


class Mark:
    """How far a page of a prefix cache is along its prompt: its last whole block, the tokens after that, and the keys
    of the blocks that end in it."""

    __slots__ = ("blocks", "keys", "link", "rest")

    def __init__(self, link: bytes, blocks: int = 0, rest: tuple[int, ...] = (), keys: tuple[int, ...] = ()) -> None:
        self.link, self.blocks, self.rest, self.keys = link, blocks, rest, keys


Change = tuple[str, int, int]
"""Model, key, and how often more it is held than before; with 0 the model's cache is a new one, and empty."""


class Trail:
    """Follows one prefix cache (`kv.prefix.Follower`). On the device thread."""

    def __init__(self, model: str, keys: Keys, changes: deque[Change]) -> None:
        self._model, self._keys, self._changes = model, keys, changes
        changes.append((model, 0, 0))

    def root(self, tenant: str) -> Mark:
        return Mark(self._keys.root(self._model, tenant))

    def added(self, parent: Mark, tokens: Sequence[int]) -> Mark:
        """A page of these tokens after the parent's is cached."""
        link, blocks, rest, keys = parent.link, parent.blocks, (*parent.rest, *tokens), []
        if blocks >= MOST_BLOCKS:
            return Mark(link, blocks)
        whole = min(len(rest) // BLOCK_TOKENS, MOST_BLOCKS - blocks)
        for at in range(0, whole * BLOCK_TOKENS, BLOCK_TOKENS):
            link = follow(link, array("I", rest[at : at + BLOCK_TOKENS]).tobytes())
            keys.append(key_of(link))
            self._changes.append((self._model, keys[-1], 1))
        return Mark(link, blocks + whole, rest[whole * BLOCK_TOKENS :], tuple(keys))

    def removed(self, mark: Mark) -> None:
        """It is cached no more."""
        for key in mark.keys:
            self._changes.append((self._model, key, -1))


class Prefixes:
    """What this node's caches hold, and what the leader was told of it."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self.keys = Keys(secret)
        # Written by the device thread, read by the loop: both ends of a deque are safe to use at the same time.
        self._changes: deque[Change] = deque()
        self._held: dict[str, dict[int, int]] = {}  # by model, how many pages hold that block
        self._told: set[int] = set()
        self._news: dict[int, bool] = {}  # keys of which it was not told what they are now: whether they are held
        self._afresh = True

    def trail(self, model: str) -> Trail:
        """For a new and empty cache of the model."""
        return Trail(model, self.keys, self._changes)

    def look(self) -> None:
        """Take in what the device thread has noted. To be called now and then, also while nobody is told."""
        while self._changes:
            model, key, more = self._changes.popleft()
            held = self._held.setdefault(model, {})
            if more == 0:
                for one in held:
                    self._note(one, False)
                held.clear()
                continue
            count = held.get(key, 0) + more
            if count > 0:
                held[key] = count
            else:
                held.pop(key, None)
            self._note(key, count > 0)

    def _note(self, key: int, held: bool) -> None:
        if held == (key in self._told):
            self._news.pop(key, None)
        else:
            self._news[key] = held

    def restart(self) -> None:
        """A leader that knows nothing is told everything."""
        self.look()
        self._told.clear()
        self._news = dict.fromkeys((key for held in self._held.values() for key in held), True)
        self._afresh = True

    def news(self, node: str) -> Cached | None:
        """What came and went since the last time, as much as is told at once; None where nothing did."""
        self.look()
        gone = [key for key, held in self._news.items() if not held][:MOST_TOLD]
        self._told.difference_update(gone)
        room = min(MOST_TOLD, MOST_HELD - len(self._told))
        came = [key for key, held in self._news.items() if held][:room]
        self._told.update(came)
        full = len(self._told) == MOST_HELD
        self._news = {
            key: held for key, held in self._news.items() if held != (key in self._told) and not (held and full)
        }
        if not (came or gone or self._afresh):
            return None
        afresh, self._afresh = self._afresh, False
        return Cached(node, tuple(came), tuple(gone), afresh)
