"""Attention over contexts of several spans: against float64, and the same bits however rows, spans and threads meet.

Page sizes cover every way in which positions fall into spans: many pages a span, one, and several spans a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_cases import (
    TABLES,
    Chunk,
    Heads,
    Paged,
    attend64,
    error,
    give,
    open_table,
    paged,
    rounded,
    take,
)

from janus_server.kernels.table import DType

CLOSE = 3e-6  # f32 sums of a few thousand terms
PAGE_TOKENS = (1, 14, 91, 128, 200, 300, 1000)
MOST_TOKENS = 1100


@pytest.fixture(scope="module", params=TABLES[1:])
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = open_table(request.param)
    yield made
    made.close()


def written(table: Any, h: Heads, lengths: list[int], seed: int) -> tuple[Paged, list[np.ndarray], list[np.ndarray]]:
    """Sequences whose keys and values were written through the table, unrotated; pages hold NaN elsewhere."""
    rng = np.random.default_rng(seed)
    store = paged(table, h, lengths, rng)
    keys = [rng.standard_normal((n, h.kv_heads, h.dim)).astype(np.float32) for n in lengths]
    values = [rng.standard_normal((n, h.kv_heads, h.dim)).astype(np.float32) for n in lengths]
    for s, n in enumerate(lengths):
        write(table, store, h, keys[s], values[s], Chunk(s, 0, n))
    return store, keys, values


def write(table: Any, store: Paged, h: Heads, keys: np.ndarray, values: np.ndarray, chunk: Chunk) -> None:
    n = len(keys)
    qkv = np.concatenate([np.zeros((n, h.heads, h.dim), np.float32), keys, values], axis=1).reshape(n, -1)
    still = (np.ones((MOST_TOKENS, h.dim // 2), np.float32), np.zeros((MOST_TOKENS, h.dim // 2), np.float32))
    table.rope_and_cache(
        give(table, qkv), None, None, 1e-6, table.vector(still[0]), table.vector(still[1]), store.inputs([chunk]),
        store.cache, table.empty((n, h.heads, h.dim), DType.F32),
    )  # fmt: skip


def attend(table: Any, store: Paged, queries: list[np.ndarray], chunks: list[Chunk]) -> np.ndarray:
    """Outputs of these rows of each sequence in one call."""
    q = np.concatenate([queries[c.sequence][c.first : c.last] for c in chunks])
    out = table.empty(q.shape, DType.F32)
    table.attention(give(table, q), store.inputs(chunks), store.cache, q.shape[2] ** -0.5, out)
    return take(table, out)


def some_queries(h: Heads, lengths: list[int], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, h.heads, h.dim)).astype(np.float32) * 2 for n in lengths]


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_long_contexts_are_right(native: Any, page_tokens: int, dtype: DType) -> None:
    h = Heads(6, 2, 72, page_tokens, dtype)
    lengths = [MOST_TOKENS, 256, 257]
    store, keys, values = written(native, h, lengths, page_tokens)
    queries = some_queries(h, lengths, 1)
    chunks = [Chunk(0, 1090, 1100), Chunk(1, 250, 256), Chunk(2, 256, 257)]
    want = [
        attend64(
            queries[c.sequence][c.first : c.last], rounded(keys[c.sequence], dtype),
            rounded(values[c.sequence], dtype), c.first, h.dim**-0.5,
        )
        for c in chunks
    ]  # fmt: skip
    assert error(attend(native, store, queries, chunks), np.concatenate(want)) < CLOSE


@pytest.mark.parametrize("page_tokens", PAGE_TOKENS)
def test_a_row_has_the_same_bits_alone_and_in_a_prompt(native: Any, page_tokens: int) -> None:
    """Alone its spans are divided between threads; in a prompt one task walks them for many rows."""
    h = Heads(4, 2, 64, page_tokens, DType.BF16)
    store, _, _ = written(native, h, [700], page_tokens)
    queries = some_queries(h, [700], 2)
    prompt = attend(native, store, queries, [Chunk(0, 0, 700)])
    for row in (0, 63, 255, 256, 300, 511, 600, 699):
        assert attend(native, store, queries, [Chunk(0, row, row + 1)]).tobytes() == prompt[row : row + 1].tobytes()


@pytest.mark.parametrize("lengths", [[1000], [1000, 40, 40, 40, 40], [300] * 9])
def test_any_number_of_threads_gives_the_same_bits(lengths: list[int]) -> None:
    h = Heads(8, 2, 64, 128, DType.BF16)
    outs = []
    for threads in (1, 2, 3, 7):
        table = open_table("cpu", threads)
        store, _, _ = written(table, h, lengths, 3)
        outs.append(
            attend(table, store, some_queries(h, lengths, 4), [Chunk(s, n - 1, n) for s, n in enumerate(lengths)])
        )
        table.close()
    assert np.isfinite(outs[0]).all()
    assert {out.tobytes() for out in outs} == {outs[0].tobytes()}


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_comes_later_cannot_harm(native: Any, bad: float) -> None:
    """A key and a value that overflowed at position 40 of a prompt: rows before it are as they would have been."""
    h = Heads(4, 2, 64, 91, DType.F32)
    store, keys, values = written(native, h, [120], 5)
    queries = some_queries(h, [120], 6)
    clean = attend(native, store, queries, [Chunk(0, 0, 120)])
    keys[0][40], values[0][40] = bad, bad
    write(native, store, h, keys[0][40:41], values[0][40:41], Chunk(0, 40, 41))
    got = attend(native, store, queries, [Chunk(0, 0, 120)])
    assert got[:40].tobytes() == clean[:40].tobytes()
    assert not np.isfinite(got[40:]).any()


def test_a_copied_page_reads_the_same(native: Any) -> None:
    """Pages move whole, half-filled panels of keys and all."""
    h = Heads(2, 2, 64, 91, DType.BF16)
    store, _, _ = written(native, h, [150, 150], 7)
    queries = some_queries(h, [150, 150], 8)
    want = attend(native, store, queries, [Chunk(0, 149, 150)])
    # copy_pages counts pages from the slab's start, as layers do.
    for source, target in zip(store.pages[0], store.pages[1], strict=True):
        native.copy_pages(store.cache.slab, store.cache.page_stride_bytes, int(source), int(target))
    queries[1] = queries[0]
    assert attend(native, store, queries, [Chunk(1, 149, 150)]).tobytes() == want.tobytes()
