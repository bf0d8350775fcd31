"""The determinism contract, bit for bit: a row's result depends on that row and the cache before it, and on nothing
else.

Each test computes the same rows in one call and again cut, shuffled, mixed with other rows or stored on other pages.
torch_ref promises this in f32 only; the native tables in both dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import TABLES, Chunk, Heads, angles, give, meant, open_table, paged, some_rows, stored, take

from janus_server.kernels.table import DType, Form

CASES = [(name, dtype) for name in TABLES for dtype in DType if (name, dtype) != ("torch_ref", DType.BF16)]
STORED = [(name, form) for name in TABLES for form in Form if name != "torch_ref" or form is Form.F32]
MANY = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1].name}")
def case(request: pytest.FixtureRequest) -> Iterator[tuple[Any, DType]]:
    name, dtype = request.param
    table = open_table(name)
    yield table, dtype
    table.close()


@pytest.fixture(scope="module", params=STORED, ids=lambda c: f"{c[0]}-{c[1].name}")
def stored_case(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Form]]:
    name, form = request.param
    table = open_table(name)
    yield table, form
    table.close()


def pieces(rng: np.random.Generator, rows: int) -> list[np.ndarray]:
    """Random rows in random order, cut into calls of random size; some rows come twice."""
    order = np.concatenate([rng.permutation(rows), rng.integers(0, rows, 5)])
    cuts = np.sort(rng.integers(0, order.size, int(rng.integers(1, 12))))
    return [p for p in np.split(order, cuts) if p.size]


@MANY
@given(
    rows=st.sampled_from([1, 2, 13, 16, 40, 130]), n=st.sampled_from([1, 17, 32, 64, 100, 300, 520]),
    k=st.sampled_from([3, 64, 172, 512, 576, 1536]), seed=st.integers(0, 999),
)  # fmt: skip
def test_linear(stored_case: tuple[Any, Form], rows: int, n: int, k: int, seed: int) -> None:
    table, form = stored_case
    rng = np.random.default_rng(seed)
    k = -(-k // form.block_values) * form.block_values
    matrix = stored(table, ((form, some_rows(form, n, k, seed)),))
    x, bias = rng.standard_normal((rows, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    base = rng.standard_normal((rows, n)).astype(np.float32)

    def run(some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        out, added = table.empty((some.size, n), DType.F32), give(table, base[some])
        table.linear(give(table, x[some]), matrix, table.vector(bias), out)
        table.linear_add(give(table, x[some]), matrix, added)
        return take(table, out), take(table, added)

    whole = run(np.arange(rows))
    for some in pieces(rng, rows):
        for got, want in zip(run(some), whole, strict=True):
            assert got.tobytes() == want[some].tobytes()


@MANY
@given(rows=st.integers(1, 70), k=st.sampled_from([1, 8, 63, 172, 512, 600, 3072]), seed=st.integers(0, 999))
def test_row_wise_operations(case: tuple[Any, DType], rows: int, k: int, seed: int) -> None:
    table, dtype = case
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((rows, 2 * k)) * 4).astype(np.float32)
    weight = rng.standard_normal(2 * k).astype(np.float32)
    act = table.act_dtype(dtype)

    def run(some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        normed, mixed = table.empty((some.size, 2 * k), act), table.empty((some.size, k), act)
        table.rms_norm(give(table, x[some]), table.vector(weight), 1e-5, normed)
        table.silu_mul(give(table, x[some]), mixed)
        return take(table, normed), take(table, mixed)

    whole = run(np.arange(rows))
    for some in pieces(rng, rows):
        for got, want in zip(run(some), whole, strict=True):
            assert got.tobytes() == want[some].tobytes()


def chunkings(rng: np.random.Generator, lengths: list[int]) -> list[list[Chunk]]:
    """Steps that compute all positions of all sequences, in random chunks, sequences mixed."""
    done, steps = [0] * len(lengths), []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        step = []
        for s in rng.permutation(len(lengths)):
            left = lengths[s] - done[s]
            size = int(min(left, rng.choice([0, 1, 1, 2, 7, 33, 200])))
            if size:
                step.append(Chunk(int(s), done[s], done[s] + size))
                done[s] += size
        if step:
            steps.append(step)
    return steps


@MANY
@given(
    group=st.sampled_from([1, 2, 3, 8]), kv_heads=st.sampled_from([1, 2]), dim=st.sampled_from([8, 64, 80, 128]),
    page_tokens=st.sampled_from([3, 16, 91]), normed=st.booleans(), seed=st.integers(0, 999),
)  # fmt: skip
def test_rope_cache_and_attention(
    case: tuple[Any, DType], group: int, kv_heads: int, dim: int, page_tokens: int, normed: bool, seed: int
) -> None:
    """Whole prompts alone, against random chunks of all sequences together on pages in another order."""
    table, dtype = case
    rng = np.random.default_rng(seed)
    h = Heads(group * kv_heads, kv_heads, dim, page_tokens, dtype)
    lengths = [int(rng.integers(1, 200)), 130, int(rng.integers(1, 70))]
    qkv = [rng.standard_normal((n, (h.heads + 2 * kv_heads) * dim)).astype(np.float32) for n in lengths]
    cos, sin = (table.vector(a) for a in angles(200, dim))
    weight = table.vector(rng.standard_normal(dim).astype(np.float32)) if normed else None
    act = table.act_dtype(dtype)

    def run(steps: list[list[Chunk]]) -> list[np.ndarray]:
        store = paged(table, h, lengths, rng)
        outs = [np.zeros((n, h.heads, dim), np.float32) for n in lengths]
        for step in steps:
            inputs = store.inputs(step)
            rows = np.concatenate([qkv[c.sequence][c.first : c.last] for c in step])
            q, out = (table.empty((len(rows), h.heads, dim), act) for _ in range(2))
            table.rope_and_cache(give(table, rows), weight, weight, 1e-6, cos, sin, inputs, store.cache, q)
            table.attention(q, inputs, store.cache, dim**-0.5, out)
            got = take(table, out)
            for c, a, b in zip(step, inputs.query_start[:-1], inputs.query_start[1:], strict=True):
                outs[c.sequence][c.first : c.last] = got[a:b]
        return outs

    alone = run([[Chunk(s, 0, n)] for s, n in enumerate(lengths)])
    mixed = run(chunkings(rng, lengths))
    one_by_one = run([[Chunk(0, i, i + 1)] for i in range(lengths[0])])
    assert np.isfinite(np.concatenate([a.ravel() for a in alone])).all()
    for s in range(len(lengths)):
        assert mixed[s].tobytes() == alone[s].tobytes()
    assert one_by_one[0].tobytes() == alone[0].tobytes()


def test_embed_gives_stored_values_whatever_the_batch(stored_case: tuple[Any, Form]) -> None:
    table, form = stored_case
    rng = np.random.default_rng(0)
    k = 33 * form.block_values
    raw = some_rows(form, 70, k, 0)
    matrix = stored(table, ((form, raw),))
    for rows in (1, 16, 41):
        ids = rng.integers(0, 70, rows).astype(np.int32)
        x = table.empty((rows, k), DType.F32)
        table.embed(ids, matrix, x)
        assert take(table, x).tobytes() == meant(raw, form)[ids].tobytes()
