"""xTensor on one node: the page pool and the bytes behind it, as weight windows and as the KV slab.

A model's weights live in a window (a stable contiguous range mapped from the lowest free pages); KV pages are addressed
through the slab by page id, with no mapping call. `lifecycle` moves weights in and out as transactions.
"""

from __future__ import annotations

import msgspec
import numpy as np

from janus_server.errors import BadConfig, require
from janus_server.kv.blocks import pages_for
from janus_server.kv.pages import PagePool, Reservation
from janus_server.kv.vmm_cpu import CpuMemory
from janus_server.types import Owner, PageKind


class KvLayout(msgspec.Struct, frozen=True):
    """How one page holds `page_tokens` positions of all layers: layer l starts at l·layer_bytes.

    Within a layer: keys then values; the order inside is the kernel table's own.
    """

    page_tokens: int
    layer_bytes: int
    token_bytes: int


def kv_layout(page_bytes: int, layers: int, kv_heads: int, head_dim: int, element_bytes: int) -> KvLayout:
    """As many tokens as fit. Example (Qwen3-8B, 2 MiB): 147,456 B a token, 14 tokens, 1.6 % of the page unused."""
    token_layer_bytes = 2 * kv_heads * head_dim * element_bytes
    token_bytes = layers * token_layer_bytes
    page_tokens = page_bytes // token_bytes
    if page_tokens < 1:
        raise BadConfig(f"page-size {page_bytes} is smaller than one token's keys and values ({token_bytes} bytes)")
    return KvLayout(page_tokens, page_tokens * token_layer_bytes, token_bytes)


class XTensor:
    """One node's device memory. The pool belongs to one thread; windows are mapped on the thread that copies."""

    def __init__(self, memory_bytes: int, page_bytes: int) -> None:
        self.pool = PagePool(max(1, memory_bytes // page_bytes))
        self.page_bytes = page_bytes
        self.memory = CpuMemory(self.pool.n_pages, page_bytes)

    @property
    def slab(self) -> np.ndarray:
        """All pages in id order as flat uint8."""
        return self.memory.slab

    def weights(self, model: str, size_bytes: int) -> WeightMemory:
        """A place for a model's weights: an address range that stays the same for good, nothing behind it yet."""
        return WeightMemory(self, Owner(model, PageKind.WEIGHTS), size_bytes)

    def close(self) -> None:
        """Give the memory back. No array over it may be used afterwards."""
        self.memory.close()


class WeightMemory:
    """One model's weights on the device: reserve → map → (fill) → commit, and back by unmap → release.

    reserve, commit and release belong to the pool's thread; map and unmap to whoever copies. Between unmap and
    map the addresses are kept, so that what was bound to them (views, captured programs) is right again after a wake.
    """

    def __init__(self, xtensor: XTensor, owner: Owner, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.n_pages = pages_for(size_bytes, xtensor.page_bytes)
        self.owner = owner
        self.pages: tuple[int, ...] = ()
        self._pool = xtensor.pool
        self._window = xtensor.memory.window(self.n_pages)
        self._reservation: Reservation | None = None

    @property
    def array(self) -> np.ndarray:
        """Flat uint8 [size_bytes] at the window's address; to touch it while nothing is mapped is a fault."""
        return self._window.array[: self.size_bytes]

    def reserve(self) -> bool:
        """Take the lowest free pages; False when too few are free."""
        require(self._reservation is None and not self.pages, f"{self.owner.model} has weight pages already")
        self._reservation = self._pool.reserve_low(self.n_pages, self.owner)
        return self._reservation is not None

    def map(self) -> None:
        """Put the reserved pages behind the addresses."""
        require(self._reservation is not None, "pages are reserved before they are mapped")
        if self._reservation is not None:
            self._window.map(self._reservation.pages)

    def commit(self) -> None:
        """The bytes are there: the pages are the model's."""
        require(self._reservation is not None, "there is nothing to commit")
        if self._reservation is not None:
            self.pages, self._reservation = self._reservation.commit(), None

    def unmap(self) -> None:
        """Take the pages from behind the addresses; nothing may use the weights any more."""
        self._window.unmap()

    def release(self) -> None:
        """Return the pages to the pool, committed or only reserved. They must not be mapped any more."""
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        self._pool.release(self.owner, self.pages)
        self.pages = ()
