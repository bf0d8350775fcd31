"""xTensor on one node: the page pool and the bytes behind it, as weight windows and as the KV slab.

A model's weights live in a window (a stable contiguous range mapped from the lowest free pages); KV pages are addressed
through the slab by page id, with no mapping call. Loading is a transaction: reserve, map, fill, commit or roll back.
Everything here runs on the thread that owns the pool.
"""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np

from janus_server.errors import BadConfig, require
from janus_server.kv.blocks import pages_for
from janus_server.kv.pages import PagePool, Reservation
from janus_server.kv.vmm_cpu import CpuMemory, Window
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


@dataclasses.dataclass(frozen=True, slots=True)
class WeightMemory:
    """Where one model's weights lie; `array` is flat uint8 over the bytes asked for."""

    owner: Owner
    pages: tuple[int, ...]
    window: Window
    array: np.ndarray


class XTensor:
    """One node's device memory."""

    def __init__(self, memory_bytes: int, page_bytes: int) -> None:
        self.pool = PagePool(max(1, memory_bytes // page_bytes))
        self.page_bytes = page_bytes
        self.memory = CpuMemory(self.pool.n_pages, page_bytes)
        self._weights: dict[str, WeightMemory] = {}

    @property
    def slab(self) -> np.ndarray:
        """All pages in id order as flat uint8."""
        return self.memory.slab

    def open_weights(self, model: str, size_bytes: int) -> WeightTransaction | None:
        """Pages and a mapped window for a model's weights, to be filled and committed; None when too few are free."""
        require(model not in self._weights, f"{model} has weights already")
        owner = Owner(model, PageKind.WEIGHTS)
        reservation = self.pool.reserve_low(pages_for(size_bytes, self.page_bytes), owner)
        if reservation is None:
            return None
        window = self.memory.window(len(reservation.pages))
        return WeightTransaction(self, reservation, window, window.map(reservation.pages)[:size_bytes])

    def weights(self, model: str) -> WeightMemory:
        return self._weights[model]

    def close_weights(self, model: str) -> None:
        """Unmap a model's window and return its pages. Nothing may use the weights any more."""
        held = self._weights.pop(model)
        held.window.close()
        self.pool.release(held.owner, held.pages)

    def close(self) -> None:
        for model in list(self._weights):
            self.close_weights(model)
        self.memory.close()


class WeightTransaction:
    """Weight pages being filled. Ends by exactly one of `commit` and `rollback`."""

    def __init__(self, xtensor: XTensor, reservation: Reservation, window: Window, array: np.ndarray) -> None:
        self.array = array
        self._xtensor = xtensor
        self._reservation = reservation
        self._window = window

    def commit(self) -> WeightMemory:
        owner = self._reservation.owner
        held = WeightMemory(owner, self._reservation.commit(), self._window, self.array)
        self._xtensor._weights[owner.model] = held
        return held

    def rollback(self) -> None:
        self._window.close()
        self._reservation.cancel()
