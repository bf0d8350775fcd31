"""Every operation of every kernel table against float64 formulas: odd shapes, both dtypes, pages in random order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    TABLES,
    Chunk,
    Heads,
    aligned,
    angles,
    attend64,
    error,
    from_bits,
    give,
    norm64,
    open_table,
    paged,
    rotate64,
    rounded,
    take,
    to_bits,
    weights,
)  # fmt: skip

from janus_server.errors import Bug
from janus_server.kernels.table import PLAIN_FORM, Band, DType, Form, StepInputs

NATIVE = TABLES[1:]
MANY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
DTYPES = st.sampled_from(list(DType))
# f32 sums of a few thousand terms; torch_ref's bf16 products are rounded to bf16 on the way in and out.
CLOSE, ROUGH = 3e-6, 1.5e-2


@pytest.fixture(scope="module", params=TABLES)
def table(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = open_table(request.param)
    yield made
    made.close()


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = open_table(request.param)
    yield made
    made.close()


def near(table: Any, dtype: DType) -> float:
    return ROUGH if table.name == "torch_ref" and dtype is DType.BF16 else CLOSE


@MANY
@given(n=st.integers(1, 140), k=st.integers(1, 70), dtype=DTYPES, seed=st.integers(0, 99))
def test_rows_come_back_as_stored(table: Any, n: int, k: int, dtype: DType, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    matrix = weights(table, values, dtype)
    assert table.band_bytes(n, k, PLAIN_FORM[dtype]) % 64 == 0
    assert table.read_rows(matrix).tobytes() == rounded(values, dtype).tobytes()


@pytest.mark.parametrize("dtype", list(DType))
def test_store_counts_values_that_are_not_finite(table: Any, dtype: DType) -> None:
    values = np.ones((33, 7), np.float32)
    values[0, 0], values[5, 6], values[32, 3], values[7, 1] = np.nan, np.inf, -np.inf, 3e38
    form = PLAIN_FORM[dtype]
    matrix = table.matrix(aligned(table.band_bytes(33, 7, form)), 7, (Band(form, 33),))
    assert table.store_rows(values if dtype is DType.F32 else to_bits(values), 0, matrix) == 3


def test_store_refuses_what_does_not_fit(table: Any) -> None:
    bands = (Band(Form.F32, 40),)
    matrix = table.matrix(aligned(table.band_bytes(40, 8, Form.F32)), 8, bands)
    for rows, start in (
        (np.zeros((41, 8), np.float32), 0),
        (np.zeros((32, 9), np.float32), 0),
        (np.zeros((32, 8), np.uint16), 0),
    ):
        with pytest.raises(Bug):
            table.store_rows(rows, start, matrix)
    with pytest.raises(Bug):
        table.matrix(aligned(64), 8, bands)


@MANY
@given(
    rows=st.one_of(st.integers(1, 40), st.just(300)), n=st.integers(1, 300),
    k=st.sampled_from([1, 2, 7, 64, 172, 513, 1536]), dtype=DTYPES, seed=st.integers(0, 99),
)  # fmt: skip
def test_linear(table: Any, rows: int, n: int, k: int, dtype: DType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values, bias = rng.standard_normal((n, k)), rng.standard_normal(n).astype(np.float32)
    x, before = rng.standard_normal((rows, k)), rng.standard_normal((rows, n)).astype(np.float32)
    matrix = weights(table, values, dtype)
    act = give(table, rounded(x, table.act_dtype(dtype)), table.act_dtype(dtype))
    given_x, given_w = rounded(x, table.act_dtype(dtype)).astype(np.float64), rounded(values, dtype)
    product = given_x @ given_w.T
    # What rounding is relative to: where the terms of a sum cancel, its own size says nothing.
    size = float((np.abs(given_x) @ np.abs(given_w).T).max())
    out = table.empty((rows, n), DType.F32)
    table.linear(act, matrix, None, out)
    assert error(take(table, out), product, size) < near(table, dtype)
    table.linear(act, matrix, table.vector(bias), out)
    assert error(take(table, out), product + bias, size) < near(table, dtype)
    total = give(table, before)
    table.linear_add(act, matrix, total)
    assert error(take(table, total), product + before, size) < near(table, dtype)


@MANY
@given(rows=st.integers(1, 60), n=st.integers(1, 130), k=st.integers(1, 90), dtype=DTYPES, seed=st.integers(0, 99))
def test_embed_and_take_rows(table: Any, rows: int, n: int, k: int, dtype: DType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, k))
    ids = rng.integers(0, n, rows).astype(np.int32)
    x = table.empty((rows, k), DType.F32)
    table.embed(ids, weights(table, values, dtype), x)
    assert np.array_equal(take(table, x), rounded(values, dtype)[ids])
    wanted = rng.integers(0, rows, 5).astype(np.int32)
    out = table.empty((5, k), DType.F32)
    table.take_rows(x, wanted, out)
    assert np.array_equal(take(table, out), rounded(values, dtype)[ids][wanted])


@MANY
@given(rows=st.integers(1, 40), k=st.integers(1, 700), scale=st.sampled_from([1e-4, 1.0, 1e3]), seed=st.integers(0, 99))
def test_rms_norm(table: Any, rows: int, k: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = (rng.standard_normal((rows, k)) * scale).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    out = table.empty((rows, k), DType.F32)
    table.rms_norm(give(table, x), table.vector(weight), 1e-6, out)
    assert error(take(table, out), norm64(x, weight, 1e-6)) < CLOSE


@MANY
@given(rows=st.integers(1, 20), f=st.integers(1, 200), scale=st.sampled_from([0.1, 3.0, 60.0]), seed=st.integers(0, 99))
def test_silu_mul(table: Any, rows: int, f: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, 2 * f)) * scale).astype(np.float32)
    x[0, 0] = -200.0  # where e^-x would overflow
    out = table.empty((rows, f), DType.F32)
    table.silu_mul(give(table, x), out)
    gate, up = x[:, :f].astype(np.float64), x[:, f:].astype(np.float64)
    with np.errstate(over="ignore"):
        assert error(take(table, out), gate / (1 + np.exp(-gate)) * up) < CLOSE


def test_exponential_is_accurate_over_its_range(table: Any) -> None:
    """silu(x)·1 as a probe: relative error against float64 for x from -80 to 80."""
    gate = np.linspace(-80, 80, 100_001, dtype=np.float32)[None]
    x = np.concatenate([gate, np.ones_like(gate)], axis=1)
    out = table.empty(gate.shape, DType.F32)
    table.silu_mul(give(table, x), out)
    want = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))
    got = take(table, out)
    inside = np.abs(want) > 1e-30
    assert np.abs(got[inside] / want[inside] - 1).max() < 4e-7


@MANY
@given(
    group=st.sampled_from([1, 2, 3, 8]), kv_heads=st.integers(1, 3), dim=st.sampled_from([8, 64, 80, 96, 128]),
    page_tokens=st.sampled_from([3, 16, 91]), dtype=DTYPES, normed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_rope_and_cache(
    table: Any, group: int, kv_heads: int, dim: int, page_tokens: int, dtype: DType, normed: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    h = Heads(group * kv_heads, kv_heads, dim, page_tokens, dtype)
    store = paged(table, h, [40, 100, 7], rng)
    chunks = [Chunk(1, 60, 100), Chunk(0, 39, 40), Chunk(2, 0, 7)]
    inputs = store.inputs(chunks)
    rows, cos_sin = len(inputs.positions), angles(128, dim)
    qkv = rng.standard_normal((rows, (h.heads + 2 * kv_heads) * dim)).astype(np.float32)
    q_norm, k_norm = (rng.standard_normal(dim).astype(np.float32) for _ in range(2))
    before = store.cache.slab.copy()
    q = table.empty((rows, h.heads, dim), DType.F32)
    table.rope_and_cache(
        give(table, qkv), table.vector(q_norm) if normed else None, table.vector(k_norm) if normed else None, 1e-6,
        table.vector(cos_sin[0]), table.vector(cos_sin[1]), inputs, store.cache, q,
    )  # fmt: skip
    split = qkv.reshape(rows, -1, dim)
    heads, keys, values = split[:, : h.heads], split[:, h.heads : h.heads + kv_heads], split[:, h.heads + kv_heads :]
    turn = [a[inputs.positions] for a in cos_sin]
    want_q = rotate64(norm64(heads, q_norm, 1e-6) if normed else heads, *turn)
    want_k = rotate64(norm64(keys, k_norm, 1e-6) if normed else keys, *turn)
    assert error(take(table, q), want_q) < CLOSE
    got_k, got_v, touched = read_cache(store.cache, inputs, 1 if table.name == "torch_ref" else 32)
    assert error(got_k, want_k) < (CLOSE if dtype is DType.F32 else 5e-3)
    assert np.array_equal(got_v, rounded(values, dtype))
    untouched = np.ones(before.size, bool)
    untouched[touched] = False
    assert np.array_equal(store.cache.slab[untouched], before[untouched])


def read_cache(cache: Any, inputs: StepInputs, panel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys and values of each row [N, kv_heads, dim], read by the layout's definition, and the bytes they lie in.

    panel: tokens whose keys are interleaved word by word, 1 when a key lies in one piece.
    """
    size, dim, tokens = cache.dtype.bytes, cache.head_dim, cache.page_tokens
    words, row_bytes = dim * size // 4, dim * size
    keys, values, touched = [], [], []
    for position, sequence in zip(inputs.positions, inputs.row_sequence, strict=True):
        page = int(inputs.page_table[sequence, position // tokens])
        base, slot = cache.offset_bytes + page * cache.page_stride_bytes, int(position % tokens)
        first = slot // panel * panel
        step = min(panel, tokens - first)  # the last panel of a page holds what is left
        for head in range(cache.kv_heads):
            key = base + (head * tokens + first) * row_bytes
            at = key + (np.arange(words)[:, None] * step + slot - first) * 4 + np.arange(4)
            if panel == 1:
                at = key + np.arange(row_bytes)
            value = base + ((cache.kv_heads + head) * tokens + slot) * row_bytes + np.arange(row_bytes)
            for where, into in ((at.ravel(), keys), (value, values)):
                touched.append(where)
                raw = cache.slab[where]
                into.append(raw.view(np.float32) if size == 4 else from_bits(raw.view(np.uint16)))
    shape = (len(inputs.positions), cache.kv_heads, dim)
    return np.array(keys).reshape(shape), np.array(values).reshape(shape), np.concatenate(touched)


@MANY
@given(
    group=st.sampled_from([1, 2, 3, 8, 50]), kv_heads=st.integers(1, 3), dim=st.sampled_from([8, 64, 80, 96, 128]),
    page_tokens=st.sampled_from([3, 16, 91]), dtype=DTYPES, seed=st.integers(0, 99),
)  # fmt: skip
def test_attention(table: Any, group: int, kv_heads: int, dim: int, page_tokens: int, dtype: DType, seed: int) -> None:
    """Decode rows, a chunk after a cached prefix and a fresh prompt in one call, over pages that hold NaN elsewhere."""
    rng = np.random.default_rng(seed)
    h = Heads(group * kv_heads, kv_heads, dim, page_tokens, dtype)
    lengths = [1, 150, 65, int(rng.integers(1, 200))]
    store = paged(table, h, lengths, rng)
    keys = [rng.standard_normal((n, kv_heads, dim)).astype(np.float32) for n in lengths]
    values = [rng.standard_normal((n, kv_heads, dim)).astype(np.float32) for n in lengths]
    fill(table, store, h, keys, values)
    chunks = [Chunk(2, 64, 65), Chunk(1, 50, 150), Chunk(0, 0, 1), Chunk(3, 0, lengths[3])]
    inputs = store.inputs(chunks)
    q = rng.standard_normal((len(inputs.positions), h.heads, dim)).astype(np.float32) * 2
    q = rounded(q, table.act_dtype(dtype))
    out = table.empty(q.shape, table.act_dtype(dtype))
    table.attention(give(table, q, table.act_dtype(dtype)), inputs, store.cache, dim**-0.5, out)
    want = [
        attend64(q[a:b], rounded(keys[c.sequence], dtype), rounded(values[c.sequence], dtype), c.first, dim**-0.5)
        for c, a, b in zip(chunks, inputs.query_start[:-1], inputs.query_start[1:], strict=True)
    ]
    assert error(take(table, out), np.concatenate(want)) < near(table, dtype)


def fill(table: Any, store: Any, h: Heads, keys: list[np.ndarray], values: list[np.ndarray]) -> None:
    """Write whole sequences into the cache through the table, unrotated."""
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        n = len(k)
        qkv = np.concatenate([np.zeros((n, h.heads, h.dim), np.float32), k, v], axis=1).reshape(n, -1)
        still = np.ones((n, h.dim // 2), np.float32), np.zeros((n, h.dim // 2), np.float32)
        table.rope_and_cache(
            give(table, qkv), None, None, 1e-6, table.vector(still[0]), table.vector(still[1]),
            store.inputs([Chunk(s, 0, n)]), store.cache, table.empty((n, h.heads, h.dim), DType.F32),
        )  # fmt: skip


def test_attention_survives_scores_far_apart(table: Any) -> None:
    """One key takes all the weight although scores reach thousands: no overflow, no NaN."""
    h = Heads(1, 1, 8, 16, DType.F32)
    store = paged(table, h, [200], np.random.default_rng(0))
    keys, values = np.zeros((200, 1, 8), np.float32), np.arange(200 * 8, dtype=np.float32).reshape(200, 1, 8)
    keys[130] = 500.0
    fill(table, store, h, [keys], [values])
    out = table.empty((1, 1, 8), DType.F32)
    table.attention(
        give(table, np.ones((1, 1, 8), np.float32)), store.inputs([Chunk(0, 199, 200)]), store.cache, 1.0, out
    )
    assert np.array_equal(take(table, out)[0, 0], values[130, 0])


def test_copy_pages(table: Any) -> None:
    slab = np.arange(4 * 96, dtype=np.uint16).view(np.uint8).copy()
    want = slab.copy()
    want[3 * 192 : 4 * 192] = want[192:384]
    table.copy_pages(slab, 192, 1, 3)
    assert np.array_equal(slab, want)
    with pytest.raises(Bug):
        table.copy_pages(slab, 192, 1, 4)


def test_indices_out_of_range_are_bugs_not_wild_reads(table: Any) -> None:
    matrix = weights(table, np.ones((5, 4)), DType.F32)
    for ids in ([5], [-1]):
        with pytest.raises(Bug):
            table.embed(np.array(ids, np.int32), matrix, table.empty((1, 4), DType.F32))
        with pytest.raises(Bug):
            table.take_rows(table.empty((5, 4), DType.F32), np.array(ids, np.int32), table.empty((1, 4), DType.F32))
    h = Heads(1, 1, 8, 16, DType.F32)
    store = paged(table, h, [20], np.random.default_rng(0))
    good = store.inputs([Chunk(0, 19, 20)])
    past_table = StepInputs(np.array([32], np.int32), good.query_start, good.page_table, good.row_sequence)
    wild_page = StepInputs(good.positions, good.query_start, good.page_table + 1000, good.row_sequence)
    cos, sin = (table.vector(a) for a in angles(64, 8))
    q, qkv = give(table, np.ones((1, 1, 8), np.float32)), give(table, np.ones((1, 24), np.float32))
    for bad in (past_table, wild_page):
        with pytest.raises(Bug):
            table.attention(q, bad, store.cache, 1.0, table.empty((1, 1, 8), DType.F32))
        with pytest.raises(Bug):
            table.rope_and_cache(qkv, None, None, 1e-6, cos, sin, bad, store.cache, q)
    past_angles = StepInputs(np.array([64], np.int32), good.query_start, good.page_table, good.row_sequence)
    with pytest.raises(Bug):
        table.rope_and_cache(qkv, None, None, 1e-6, cos, sin, past_angles, store.cache, q)


def test_native_refuses_shapes_that_do_not_match(native: Any) -> None:
    matrix = weights(native, np.ones((5, 4)), DType.F32)
    act, out = native.empty((2, 4), DType.F32), native.empty((2, 5), DType.F32)
    with pytest.raises(Bug):
        native.linear(native.empty((2, 3), DType.F32), matrix, None, out)
    with pytest.raises(Bug):
        native.linear(act, matrix, None, native.empty((2, 6), DType.F32))
    with pytest.raises(Bug):
        native.linear(native.empty((4, 2), DType.F32).T, matrix, None, out)  # not contiguous


def test_no_rows_is_no_work(table: Any) -> None:
    matrix = weights(table, np.ones((5, 4)), DType.F32)
    table.linear(table.empty((0, 4), DType.F32), matrix, None, table.empty((0, 5), DType.F32))
    table.take_rows(table.empty((3, 4), DType.F32), np.zeros(0, np.int32), table.empty((0, 4), DType.F32))


def test_read_only_arrays_are_read(native: Any) -> None:
    ids = np.frombuffer(np.array([2, 0], np.int32).tobytes(), np.int32)
    x = native.empty((2, 4), DType.F32)
    native.embed(ids, weights(native, np.arange(12).reshape(3, 4), DType.F32), x)
    assert np.array_equal(x, np.array([[8, 9, 10, 11], [0, 1, 2, 3]], np.float32))


def test_empty_is_aligned(native: Any) -> None:
    for shape in ((1,), (3, 5), (7, 2, 33)):
        for dtype in DType:
            array = native.empty(shape, dtype)
            assert array.shape == shape and array.ctypes.data % 64 == 0 and array.flags.c_contiguous
