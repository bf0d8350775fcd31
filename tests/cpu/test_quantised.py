"""Quantised weights on the native tables: what blocks stand for, bit for bit, and products over them.

The oracle of a product is the same table's product over the dequantised rows in float32, which must agree in every bit
whatever the number of rows; that one is held to float64 and to torch_ref here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoints import random_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import TARGETS, aligned, error, give, meant, open_table, some_rows, stored, take

from janus_server.errors import Bug
from janus_server.kernels.table import Band, DType, Form
from janus_server.model.dequant import HALVES, finite_rows

QUANTISED = [form for form in Form if form.quantised]
MANY = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
CLOSE = 1e-6  # f32 sums of some thousand terms, as a share of the largest sum of magnitudes


@pytest.fixture(scope="module", params=TARGETS)
def native(request: pytest.FixtureRequest) -> Iterator[Any]:
    made = open_table(request.param)
    yield made
    made.close()


def extreme_blocks(form: Form, n: int, k: int, seed: int) -> np.ndarray:
    """Random blocks whose half floats are any finite ones: large, subnormal, negative, zeros of both signs."""
    rng = np.random.default_rng(seed)
    raw = random_blocks((n, k), gguf.GGMLQuantizationType[form.name], seed)
    blocks = raw.reshape(-1, form.row_bytes(form.block_values))
    for at in HALVES[form]:
        bits = rng.integers(0, 1 << 16, len(blocks), dtype=np.uint16)
        bits[(bits & 0x7C00) == 0x7C00] ^= 0x4000
        bits[rng.integers(0, len(bits), len(bits) // 4)] &= 0x83FF
        bits[:2] = 0x8000, 0x0000
        blocks[:, at : at + 2] = bits[:, None].view(np.uint8)
    return raw


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.label)
@pytest.mark.parametrize("n", [1, 31, 32, 70])
def test_values_are_the_references_bit_for_bit(native: Any, form: Form, n: int) -> None:
    for seed, make in ((0, some_rows), (1, extreme_blocks)):
        raw = make(form, n, 768, seed)
        matrix = stored(native, ((form, raw),))
        assert matrix.data.size == native.band_bytes(n, 768, form) and matrix.data.size % 64 == 0
        assert native.read_rows(matrix).tobytes() == meant(raw, form).tobytes()


def test_a_form_takes_about_the_bytes_of_its_file(native: Any) -> None:
    for form in QUANTISED:
        stored_bytes, file_bytes = native.band_bytes(64, 1024, form), 64 * form.row_bytes(1024)
        assert stored_bytes <= file_bytes * (1.31 if form is Form.Q6_K else 1.03)


@MANY
@given(
    rows=st.one_of(st.integers(1, 18), st.sampled_from([25, 40, 130])), n=st.integers(1, 140),
    k=st.sampled_from([256, 512, 768, 1536]), form=st.sampled_from(QUANTISED), seed=st.integers(0, 99),
)  # fmt: skip
def test_products_equal_those_over_the_dequantised_rows(
    native: Any, rows: int, n: int, k: int, form: Form, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    raw = some_rows(form, n, k, seed)
    values = meant(raw, form)
    packed, plain = stored(native, ((form, raw),)), stored(native, ((Form.F32, values),))
    x, bias = rng.standard_normal((rows, k)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    before = rng.standard_normal((rows, n)).astype(np.float32)
    outs = []
    for matrix in (packed, plain):
        out, biased, added = native.empty((rows, n), DType.F32), native.empty((rows, n), DType.F32), before.copy()
        native.linear(x, matrix, None, out)
        native.linear(x, matrix, bias, biased)
        native.linear_add(x, matrix, added)
        outs.append((out, biased, added))
    for got, want in zip(*outs, strict=True):
        assert got.tobytes() == want.tobytes()
    size = float((np.abs(x) @ np.abs(values.T)).max())
    assert error(outs[0][0], x.astype(np.float64) @ values.T.astype(np.float64), size) < CLOSE


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.label)
def test_products_agree_with_torch(native: Any, form: Form) -> None:
    torch_ref = open_table("torch_ref")
    raw = some_rows(form, 90, 512, 3)
    values = meant(raw, form)
    packed, plain = stored(native, ((form, raw),)), stored(torch_ref, ((Form.F32, values),))
    for rows in (1, 3, 20):
        x = np.random.default_rng(rows).standard_normal((rows, 512)).astype(np.float32)
        ours, theirs = native.empty((rows, 90), DType.F32), torch_ref.empty((rows, 90), DType.F32)
        native.linear(x, packed, None, ours)
        torch_ref.linear(give(torch_ref, x), plain, None, theirs)
        size = float((np.abs(x) @ np.abs(values.T)).max())
        assert error(ours, take(torch_ref, theirs), size) < CLOSE


@pytest.mark.parametrize("k", [32, 64, 96, 288, 576, 1056])
@pytest.mark.parametrize("form", [Form.Q4_1, Form.Q8_0], ids=lambda f: f.label)
def test_rows_of_any_whole_number_of_blocks(native: Any, form: Form, k: int) -> None:
    raw = some_rows(form, 50, k, k)
    packed, plain = stored(native, ((form, raw),)), stored(native, ((Form.F32, meant(raw, form)),))
    for rows in (1, 2, 9, 30):
        x = np.random.default_rng(k).standard_normal((rows, k)).astype(np.float32)
        ours, theirs = native.empty((rows, 50), DType.F32), native.empty((rows, 50), DType.F32)
        native.linear(x, packed, None, ours)
        native.linear(x, plain, None, theirs)
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.label)
def test_any_number_of_rows(native: Any, form: Form) -> None:
    """Many rows pass over the weights in several goes, and the last go may be of one row or of a few."""
    k, n, most = 4096, 40, 110
    raw = some_rows(form, n, k, 5)
    packed, plain = stored(native, ((form, raw),)), stored(native, ((Form.F32, meant(raw, form)),))
    x = np.random.default_rng(5).standard_normal((most, k)).astype(np.float32)
    want = native.empty((most, n), DType.F32)
    native.linear(x, plain, None, want)
    for rows in range(1, most + 1):
        out = np.full((rows, n), np.nan, np.float32)
        native.linear(x[:rows], packed, None, out)
        assert out.tobytes() == want[:rows].tobytes(), f"{rows} rows"
        alone = np.full((rows, n), np.nan, np.float32)
        native.linear(x[:rows], plain, None, alone)
        assert alone.tobytes() == want[:rows].tobytes(), f"{rows} rows of plain weights"


@MANY
@given(
    forms=st.lists(st.sampled_from(list(Form)), min_size=2, max_size=4), rows=st.sampled_from([1, 4, 5, 20, 40]),
    last=st.integers(1, 70), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_matrix_of_several_forms(native: Any, forms: list[Form], rows: int, last: int, seed: int) -> None:
    """Each band's columns are what the band alone gives, in every bit; rows are looked up across bands."""
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(1, 4)) * 32 for _ in forms[1:]] + [last]
    bands = tuple(
        (form, some_rows(form, n, 512, seed + i)) for i, (form, n) in enumerate(zip(forms, sizes, strict=True))
    )
    whole, n = stored(native, bands), sum(sizes)
    x, bias = rng.standard_normal((rows, 512)).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    out, added = native.empty((rows, n), DType.F32), np.ones((rows, n), np.float32)
    native.linear(x, whole, bias, out)
    native.linear_add(x, whole, added)
    start = 0
    for form, raw in bands:
        end = start + len(raw)
        alone, more = native.empty((rows, len(raw)), DType.F32), np.ones((rows, len(raw)), np.float32)
        native.linear(x, stored(native, ((form, raw),)), bias[start:end].copy(), alone)
        native.linear_add(x, stored(native, ((form, raw),)), more)
        assert out[:, start:end].tobytes() == alone.tobytes() and added[:, start:end].tobytes() == more.tobytes()
        start = end
    ids = rng.integers(0, n, 30).astype(np.int32)
    looked_up = native.empty((30, 512), DType.F32)
    native.embed(ids, whole, looked_up)
    values = np.concatenate([meant(raw, form) for form, raw in bands])
    assert looked_up.tobytes() == values[ids].tobytes() and native.read_rows(whole).tobytes() == values.tobytes()


@pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.label)
def test_scales_that_are_not_finite_are_counted(native: Any, form: Form) -> None:
    raw = some_rows(form, 40, 512, 0)
    blocks = raw.reshape(40, -1, form.row_bytes(form.block_values))
    matrix = native.matrix(aligned(native.band_bytes(40, 512, form)), 512, (Band(form, 40),))
    assert finite_rows(raw, form).all()
    bad = 0
    for row, bits in ((3, 0x7C00), (33, 0xFC00), (39, 0x7E01)):
        for at in HALVES[form]:
            blocks[row, -1, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
            bad += 1
    assert native.store_rows(raw, 0, matrix) == bad
    assert np.flatnonzero(~finite_rows(raw, form)).tolist() == [3, 33, 39]


def test_what_does_not_fit_is_refused(native: Any) -> None:
    def matrix(k: int, *bands: Band) -> Any:
        return native.matrix(aligned(1 << 16), k, bands)

    with pytest.raises(Bug, match="whole q4_1 blocks"):
        matrix(48, Band(Form.Q4_1, 32))
    with pytest.raises(Bug, match="whole q6_k blocks"):
        matrix(128, Band(Form.Q6_K, 32))
    with pytest.raises(Bug, match="inside a panel"):
        matrix(64, Band(Form.Q4_1, 40), Band(Form.Q8_0, 32))
    with pytest.raises(Bug, match="too few"):
        native.matrix(aligned(640 * 2 - 64), 64, (Band(Form.Q4_1, 32),))
    two = matrix(64, Band(Form.Q4_1, 64), Band(Form.Q8_0, 32))
    for rows, start in (
        (np.zeros((96, 40), np.uint8), 0),  # across bands
        (np.zeros((32, 40), np.uint8), 64),  # rows of the other band's form
        (np.zeros((32, 64), np.float32), 0),
        (np.zeros((33, 68), np.uint8), 64),  # past the end
        (np.zeros((20, 40), np.uint8), 0),  # half a panel that is not the band's last
        (np.zeros((32, 40), np.uint8), -32),
    ):
        with pytest.raises(Bug):
            native.store_rows(rows, start, two)


def test_torch_ref_stores_one_plain_form() -> None:
    torch_ref = open_table("torch_ref")
    assert torch_ref.forms == {Form.F32, Form.BF16}
    for bands in ((Band(Form.Q8_0, 32),), (Band(Form.F32, 32), Band(Form.BF16, 32))):
        with pytest.raises(Bug):
            torch_ref.matrix(aligned(1 << 16), 64, bands)
