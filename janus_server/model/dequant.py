"""Turns stored tensor bytes into rows that a kernel table stores: float32, bfloat16, or the blocks as they are. Called
by `load`, one staging buffer at a time.

Arithmetic only: the float32 results equal the reference dequantisation bit for bit (same operations in the same order),
and bfloat16 is float32 rounded to nearest even. Work goes in steps that stay in a core's cache, and numpy releases the
GIL in each operation, so several threads may convert different rows. Non-finite values pass through for `store_rows`
to count; this module must never hide one.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np

from janus_server.errors import require
from janus_server.kernels.table import Form
from janus_server.model.stored import Encoding

STEP_VALUES: Final = 1 << 17  # 512 KiB of float32: with its temporaries about one L2
KEPT_FORMS: Final = MappingProxyType({
    Encoding.Q4_0: Form.Q4_1, Encoding.Q4_1: Form.Q4_1, Encoding.Q8_0: Form.Q8_0, Encoding.Q4_K: Form.Q4_K,
    Encoding.Q6_K: Form.Q6_K,
})  # fmt: skip
# Where the half floats of a block are; with finite ones every value of the block is finite.
HALVES: Final = MappingProxyType({Form.Q4_1: (0, 2), Form.Q8_0: (0,), Form.Q4_K: (0, 2), Form.Q6_K: (208,)})
VECTOR_ENCODINGS: Final = frozenset({Encoding.F32, Encoding.F16, Encoding.BF16})


def numpy_type(form: Form) -> type[np.generic]:
    """What holds rows of a form in numpy: bf16 as its uint16 bits, blocks as bytes."""
    return np.uint8 if form.quantised else np.float32 if form is Form.F32 else np.uint16


def is_plain_copy(encoding: Encoding, form: Form) -> bool:
    """True when stored bytes already are rows of the form; a form has the name of the encoding whose rows it takes."""
    return encoding.name == form.name


def convert_rows(raw: np.ndarray, encoding: Encoding, form: Form, out: np.ndarray) -> None:
    """Fill out (rows of the form, as `store_rows` takes them) from file bytes raw [r, row_bytes] uint8, contiguous."""
    if is_plain_copy(encoding, form):
        out.view(np.uint8)[...] = raw
        return
    if form.quantised:
        require(encoding is Encoding.Q4_0 and form is Form.Q4_1, f"{encoding.label} cannot become {form.label}")
        _widen_q4_0(raw, out)
        return
    flat = out.reshape(-1)
    blocks = raw.reshape(-1, encoding.block_bytes)
    step = STEP_VALUES // encoding.block_values
    values = None if form is Form.F32 else np.empty(min(STEP_VALUES, flat.size), np.float32)
    with np.errstate(all="ignore"):
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            start, count = first * encoding.block_values, len(part) * encoding.block_values
            target = flat[start : start + count]
            if values is None:
                to_float32(part, encoding, target)
            else:
                to_float32(part, encoding, values[:count])
                round_to_bf16(values[:count], target)


def finite_rows(rows: np.ndarray, form: Form) -> np.ndarray:
    """Which rows [r] of a form hold finite numbers only; in blocks that is a matter of their half floats."""
    if form is Form.F32:
        return np.asarray(np.isfinite(rows).all(axis=1))
    if form is Form.BF16:  # bf16 bits are the upper half of a float32's: all-ones exponents are NaN and infinity
        return np.asarray(((rows & 0x7F80) != 0x7F80).all(axis=1))
    blocks = rows.reshape(-1, form.row_bytes(form.block_values))
    finite = np.logical_and.reduce([np.isfinite(_halves(blocks, at)).reshape(len(rows), -1) for at in HALVES[form]])
    return np.asarray(finite.all(axis=1))


def to_float32(blocks: np.ndarray, encoding: Encoding, out: np.ndarray) -> None:
    """Fill out, flat float32, from blocks [b, block_bytes] uint8, C-contiguous; out has b · block_values elements."""
    if encoding is Encoding.F32:
        out.view(np.uint8)[...] = blocks.reshape(-1)
    elif encoding is Encoding.F16:
        out[...] = blocks.reshape(-1).view(np.float16)
    elif encoding is Encoding.BF16:
        np.left_shift(blocks.reshape(-1).view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    elif encoding is Encoding.Q8_0:
        out[...] = _groups(blocks, 2, 32).view(np.int8).reshape(-1)
        _by_block(out, 32)[...] *= _halves(blocks, 0)
    elif encoding is Encoding.Q4_0:
        _nibbles(blocks, 2, out)
        out -= np.float32(8.0)
        _by_block(out, 32)[...] *= _halves(blocks, 0)
    elif encoding is Encoding.Q4_1:
        _nibbles(blocks, 4, out)
        rows = _by_block(out, 32)
        rows *= _halves(blocks, 0)
        rows += _halves(blocks, 2)
    elif encoding is Encoding.Q4_K:
        _q4_k(blocks, out)
    else:
        _q6_k(blocks, out)


def round_to_bf16(values: np.ndarray, out: np.ndarray) -> None:
    """Fill out (uint16 bits) with values (float32, same size) rounded to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    rounded &= 1
    rounded += bits
    rounded += np.uint32(0x7FFF)
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    # A NaN with a large payload would carry over into a number. max propagates NaN and costs a tenth of isnan.
    if values.size and np.isnan(values.max()):
        out[np.isnan(values)] = 0x7FC0


def _widen_q4_0(raw: np.ndarray, out: np.ndarray) -> None:
    """Q4_0 as Q4_1, exactly: (q − 8)·d = q·d + (−8·d). A half float times −8 is one, or infinite and then refused."""
    blocks, wide = raw.reshape(-1, Encoding.Q4_0.block_bytes), out.reshape(-1, Encoding.Q4_1.block_bytes)
    with np.errstate(all="ignore"):
        offsets = np.ascontiguousarray(blocks[:, 0:2]).view(np.float16) * np.float16(-8.0)
    wide[:, 0:2] = blocks[:, 0:2]
    wide[:, 2:4] = offsets.view(np.uint8)
    wide[:, 4:] = blocks[:, 2:]


def _by_block(flat: np.ndarray, size: int) -> np.ndarray:
    return flat.reshape(-1, size)


def _halves(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at byte `offset` of each block as float32 [b, 1]."""
    pair = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return pair.view(np.float16).astype(np.float32)


def _groups(blocks: np.ndarray, offset: int, size: int) -> np.ndarray:
    """Bytes offset … offset+size-1 of each block, gathered to [b, size].

    Moved as one `size`-byte item per block: numpy copies those two to three times faster than rows of single bytes.
    """
    item = np.dtype((np.void, size))
    strided = np.ndarray((len(blocks),), item, blocks, offset, (blocks.strides[0],))
    return np.ascontiguousarray(strided).view(np.uint8).reshape(-1, size)


def _nibbles(blocks: np.ndarray, offset: int, out: np.ndarray) -> None:
    """Fill out with the 32 four-bit values of each block: low nibbles from byte `offset` on, then the high ones."""
    item = np.dtype((np.void, 16))
    packed = np.empty((len(blocks), 2), item)
    # Masked over whole blocks first: one contiguous pass costs less than a strided one over the 16 bytes that matter.
    for half, nibbles in enumerate((blocks & np.uint8(0x0F), blocks >> np.uint8(4))):
        packed[:, half] = np.ndarray((len(blocks),), item, nibbles, offset, (nibbles.strides[0],))
    out[...] = packed.view(np.uint8).reshape(-1)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Blocks of 256 as eight groups of 32, each with a six-bit scale and a six-bit minimum."""
    packed = _groups(blocks, 4, 12)
    low, high, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], axis=1)
    quants = _groups(blocks, 16, 128).reshape(-1, 4, 32)
    grouped = out.reshape(-1, 4, 2, 32)
    grouped[:, :, 0] = quants & np.uint8(0x0F)
    grouped[:, :, 1] = quants >> np.uint8(4)
    rows = _by_block(out, 32)
    rows *= (_halves(blocks, 0) * scales.astype(np.float32)).reshape(-1, 1)
    rows -= (_halves(blocks, 2) * minima.astype(np.float32)).reshape(-1, 1)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """Blocks of 256 as sixteen groups of 16; four low bits in the first 128 bytes, two high bits in the next 64."""
    low = _groups(blocks, 0, 128).reshape(-1, 2, 1, 2, 32)
    high = _groups(blocks, 128, 64).reshape(-1, 2, 1, 32)
    quants = np.empty((len(blocks), 2, 4, 32), np.uint8)
    for index in range(4):
        shifted = low[:, :, 0, index % 2] >> np.uint8(4 * (index // 2))
        shifted &= np.uint8(0x0F)
        shifted |= ((high[:, :, 0] >> np.uint8(2 * index)) & np.uint8(0x03)) << np.uint8(4)
        quants[:, :, index] = shifted
    out[...] = (quants.view(np.int8) - np.int8(32)).reshape(-1)
    scales = _groups(blocks, 192, 16).view(np.int8).astype(np.float32)
    rows = _by_block(out, 16)
    rows *= (_halves(blocks, 208) * scales).reshape(-1, 1)
