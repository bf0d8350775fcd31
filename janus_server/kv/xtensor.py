"""xTensor on one node: the page pool and the bytes behind it, as weight windows and as the KV slab.

A model's weights live in a window (a stable contiguous range mapped from the lowest free pages); KV pages are addressed
through the slab by page id, with no mapping call; activations have one window for all models, the highest pages of the
slab. `lifecycle` moves weights in and out as transactions.
"""

from __future__ import annotations

import msgspec

from janus_server.errors import BadConfig, require
from janus_server.kv.blocks import pages_for
from janus_server.kv.move import Pace
from janus_server.kv.pages import PagePool, Reservation
from janus_server.kv.touched import Touched
from janus_server.kv.vmm import Array, Between, DeviceMemory, at_once
from janus_server.kv.vmm_cpu import runs
from janus_server.types import Owner, PageKind

# Who holds the scratch window, and the pages withheld for what kernels allocate beside it: no model, whose names begin
# otherwise.
SCRATCH = Owner("(device)", PageKind.SCRATCH)
HEADROOM = Owner("(allocator)", PageKind.SCRATCH)


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

    def __init__(self, memory: DeviceMemory) -> None:
        self.pool = PagePool(memory.n_pages)
        self.page_bytes = memory.page_bytes
        self.memory = memory
        self.touched = Touched(memory.n_pages, memory.touch)
        self.scratch: Array = memory.slab[:0]

    @property
    def slab(self) -> Array:
        """All pages in id order as flat uint8."""
        return self.memory.slab

    def reserve_scratch(self, n_pages: int, headroom_pages: int = 0) -> None:
        """Take the window that the steps of all models share, for good and before anybody takes a page.

        The highest pages of a fresh pool are neighbours, so the slab maps them as one range already. headroom_pages
        more are withheld and never written: as much is taken from the system by the kernels' own allocator.
        """
        reservation = self.pool.reserve_high(n_pages, SCRATCH)
        require(reservation is not None, f"there are no {n_pages} pages for scratch")
        first = self.pool.n_pages - n_pages
        pages = () if reservation is None else reservation.commit()
        require(sorted(pages) == list(range(first, self.pool.n_pages)), "scratch is taken first")
        self.scratch = self.slab[first * self.page_bytes :]
        headroom = self.pool.reserve_high(headroom_pages, HEADROOM)
        require(headroom is not None, f"there are no {headroom_pages} pages for headroom")
        if headroom is not None:
            headroom.commit()
        self.touched.leave(first - headroom_pages, headroom_pages)

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
        self._touched = xtensor.touched
        self._slab, self._page_bytes = xtensor.slab, xtensor.page_bytes
        self._window = xtensor.memory.window(self.n_pages)
        self._reservation: Reservation | None = None
        self._mapped = False

    @property
    def array(self) -> Array:
        """Flat uint8 [size_bytes] at the window's address; to touch it while nothing is mapped is a fault."""
        return self._window.array[: self.size_bytes]

    def reserve(self) -> bool:
        """Take the lowest free pages; False when too few are free."""
        require(self._reservation is None and not self.pages, f"{self.owner.model} has weight pages already")
        self._reservation = self._pool.reserve_low(self.n_pages, self.owner)
        return self._reservation is not None

    def prepare(self, pace: Pace) -> int:
        """Have the system provide the reserved pages that were never used; how many. Raises Stopped."""
        require(self._reservation is not None, "pages are reserved before they are prepared")
        return 0 if self._reservation is None else self._touched.prepare(runs(self._reservation.pages), pace)

    def parts(self) -> list[Array]:
        """The reserved pages as the slab shows them: flat uint8, size_bytes together. They need not be mapped."""
        require(self._reservation is not None, "pages are reserved before they are filled")
        found, left = [], self.size_bytes
        for first, count in runs(self._reservation.pages if self._reservation is not None else ()):
            size = min(count * self._page_bytes, left)
            found.append(self._slab[first * self._page_bytes : first * self._page_bytes + size])
            left -= size
        return found

    def map(self, between: Between = at_once) -> None:
        """Put the reserved pages behind the addresses, in place of what an unmap that failed left there.

        between(size_bytes) may rest after every part.
        """
        require(self._reservation is not None, "pages are reserved before they are mapped")
        if self._mapped:
            self.unmap()
        if self._reservation is not None:
            self._window.map(self._reservation.pages, between)
            self._mapped = True

    def commit(self) -> None:
        """The bytes are there: the pages are the model's."""
        require(self._reservation is not None, "there is nothing to commit")
        if self._reservation is not None:
            self.pages, self._reservation = self._reservation.commit(), None

    def unmap(self, between: Between = at_once) -> None:
        """Take the pages from behind the addresses; nothing may use the weights any more."""
        self._window.unmap(between)
        self._mapped = False

    def release(self) -> None:
        """Return the pages to the pool, committed or only reserved. Nothing may use the window any more."""
        if self._reservation is not None:
            self._reservation.cancel()
            self._reservation = None
        self._pool.release(self.owner, self.pages)
        self.pages = ()
