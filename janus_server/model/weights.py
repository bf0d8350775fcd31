"""Where each weight of a model lies in its memory, and the records through which the model reads them. Pure.

The layout is a function of (spec, stored forms) alone, so two nodes that agree on `layout_hash` can copy weights
without a manifest. `load` fills a layout from a checkpoint; `bind` makes the records over memory that is or will be
filled. Names of source tensors, for both kinds of checkpoint, are here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

from janus_server.errors import require
from janus_server.kernels.table import PLAIN_FORM, Array, Band, DType, Form, Kernels, Matrix
from janus_server.model.spec import Family, ModelSpec

ALIGN_BYTES: Final = 64
LAYOUT_VERSION: Final = 2

BandBytes = Callable[[int, int, Form], int]


class SlotKind(enum.Enum):
    """MATRIX: bands in the kernel table's own forms. VECTOR: flat float32."""

    MATRIX = "matrix"
    VECTOR = "vector"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """`rows` rows of a slot that come from one tensor, under its name in either kind of checkpoint.

    gguf_pairs_head_dim: in a GGUF file of the llama architecture the rows of q and k are ordered for rotation of
    neighbours (x0, y0, x1, y1, …) in heads of this many rows, where this server rotates halves (x0, x1, …, y0, y1, …).
    0: the rows are as they should be.
    """

    hf: str
    gguf: str
    rows: int
    gguf_pairs_head_dim: int = 0


class SlotPlan(NamedTuple):
    """A slot before it has a place: its parts are stacked in order; k inputs (1 for a vector)."""

    name: str
    kind: SlotKind
    k: int
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of the layout: a matrix [n, k], or a vector of n float32 (k is 1, no bands). Its parts are stacked in
    order; so are its bands, whose borders are borders of parts."""

    name: str
    kind: SlotKind
    offset: int
    nbytes: int
    n: int
    k: int
    parts: tuple[Part, ...]
    bands: tuple[Band, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Every slot in address order, offsets multiples of 64; total_bytes is what the model's window must hold.

    dtype is the model's: that of activations where the table has them so, of the cache, and of what is not quantised.
    """

    dtype: DType
    entries: tuple[Slot, ...]
    total_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. qkv stacks q, k and v rows; gate_up gate rows, then up rows. Vectors are f32 arrays of the table."""

    attn_norm: Array
    qkv: Matrix
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: Matrix
    mlp_norm: Array
    gate_up: Matrix
    down: Matrix


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """A whole model; `head` is `embed` itself where they are tied."""

    embed: Matrix
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: Matrix


def layout(
    spec: ModelSpec, band_bytes: BandBytes, forms: Mapping[str, tuple[Form, ...]] = MappingProxyType({})
) -> Layout:
    """Place every weight of a model; band_bytes is the kernel table's.

    forms gives, by the names of slots, the stored form of each part; parts of slots that it lacks are as spec.dtype is.
    """
    entries: list[Slot] = []
    offset = 0
    for name, kind, k, parts in slot_plans(spec):
        n = sum(part.rows for part in parts)
        bands: tuple[Band, ...] = ()
        if kind is SlotKind.MATRIX:
            bands = _bands(parts, forms.get(name) or (PLAIN_FORM[spec.dtype],) * len(parts))
        nbytes = sum(band_bytes(band.rows, k, band.form) for band in bands) if bands else 4 * n
        entries.append(Slot(name, kind, offset, nbytes, n, k, parts, bands))
        offset = -(-(offset + nbytes) // ALIGN_BYTES) * ALIGN_BYTES
    return Layout(spec.dtype, tuple(entries), offset)


def layout_hash(placed: Layout, stored_form: str) -> str:
    """Hex digest that two nodes compare before weights are copied; stored_form names the kernel table's matrix form."""
    lines = [f"layout {LAYOUT_VERSION} {stored_form} {placed.dtype.value} {placed.total_bytes}"]
    for s in placed.entries:
        bands = " ".join(f"{band.form.label}:{band.rows}" for band in s.bands)
        lines.append(f"{s.name} {s.kind.value} {s.offset} {s.nbytes} {s.n} {s.k} {bands}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def form_names(placed: Layout) -> str:
    """What the matrices are stored as, for people, the form of most values first: "q4_1 + q8_0"."""
    values: dict[Form, int] = {}
    for slot in placed.entries:
        for band in slot.bands:
            values[band.form] = values.get(band.form, 0) + band.rows * slot.k
    return " + ".join(form.label for form in sorted(values, key=lambda form: (-values[form], form.label)))


def bind(placed: Layout, kernels: Kernels, memory: np.ndarray) -> Weights:
    """The records over memory, flat uint8 of layout.total_bytes at an address that is a multiple of 64."""
    require(memory.dtype == np.uint8 and memory.shape == (placed.total_bytes,), "weight memory must fit its layout")
    require(
        memory.flags.c_contiguous and memory.ctypes.data % ALIGN_BYTES == 0, "weight memory must be 64-byte aligned"
    )
    bound: dict[str, Any] = {slot.name: bind_slot(slot, kernels, memory) for slot in placed.entries}
    count = sum(name.endswith(".qkv") for name in bound)
    layers = tuple(_layer(bound, f"layers.{index}.") for index in range(count))
    return Weights(bound["embed"], layers, bound["final_norm"], bound.get("head", bound["embed"]))


def bind_slot(slot: Slot, kernels: Kernels, memory: np.ndarray) -> Array | Matrix:
    """One slot's matrix or vector over its stretch of memory."""
    data = memory[slot.offset : slot.offset + slot.nbytes]
    if slot.kind is SlotKind.MATRIX:
        return kernels.matrix(data, slot.k, slot.bands)
    return kernels.vector(data.view(np.float32))


def _bands(parts: tuple[Part, ...], forms: tuple[Form, ...]) -> tuple[Band, ...]:
    """Neighbouring parts of one form together."""
    pairs = groupby(zip(forms, parts, strict=True), key=lambda pair: pair[0])
    return tuple(Band(form, sum(part.rows for _, part in group)) for form, group in pairs)


def _layer(bound: dict[str, Any], prefix: str) -> LayerWeights:
    """A layer's record: its slots are named like the fields, and a slot that the family lacks is None."""
    fields: dict[str, Any] = {f.name: bound.get(prefix + f.name) for f in dataclasses.fields(LayerWeights)}
    return LayerWeights(**fields)


def slot_plans(spec: ModelSpec) -> Iterator[SlotPlan]:
    """Every slot in address order: the embedding, the layers as a step reads them, the head."""
    embed = Part("model.embed_tokens.weight", "token_embd.weight", spec.vocab)
    yield SlotPlan("embed", SlotKind.MATRIX, spec.hidden, (embed,))
    for index in range(spec.n_layers):
        yield from _layer_slots(spec, index)
    final = Part("model.norm.weight", "output_norm.weight", spec.hidden)
    yield SlotPlan("final_norm", SlotKind.VECTOR, 1, (final,))
    if not spec.tied_embeddings:
        yield SlotPlan("head", SlotKind.MATRIX, spec.hidden, (Part("lm_head.weight", "output.weight", spec.vocab),))


def _layer_slots(spec: ModelSpec, index: int) -> Iterator[SlotPlan]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    # Only the llama architecture reorders its rows in GGUF; see Part.
    pairs = spec.head_dim if spec.family is Family.LLAMA else 0

    def part(hf: str, gguf: str, rows: int, pairs: int = 0) -> Part:
        return Part(f"model.layers.{index}.{hf}", f"blk.{index}.{gguf}", rows, pairs)

    def vector(name: str, *parts: Part) -> SlotPlan:
        return SlotPlan(f"layers.{index}.{name}", SlotKind.VECTOR, 1, parts)

    def matrix(name: str, k: int, *parts: Part) -> SlotPlan:
        return SlotPlan(f"layers.{index}.{name}", SlotKind.MATRIX, k, parts)

    yield vector("attn_norm", part("input_layernorm.weight", "attn_norm.weight", spec.hidden))
    yield matrix(
        "qkv",
        spec.hidden,
        part("self_attn.q_proj.weight", "attn_q.weight", q_rows, pairs),
        part("self_attn.k_proj.weight", "attn_k.weight", kv_rows, pairs),
        part("self_attn.v_proj.weight", "attn_v.weight", kv_rows),
    )
    if spec.qkv_bias:
        yield vector(
            "qkv_bias",
            part("self_attn.q_proj.bias", "attn_q.bias", q_rows),
            part("self_attn.k_proj.bias", "attn_k.bias", kv_rows),
            part("self_attn.v_proj.bias", "attn_v.bias", kv_rows),
        )
    if spec.qk_norm:
        yield vector("q_norm", part("self_attn.q_norm.weight", "attn_q_norm.weight", spec.head_dim))
        yield vector("k_norm", part("self_attn.k_norm.weight", "attn_k_norm.weight", spec.head_dim))
    yield matrix("o", q_rows, part("self_attn.o_proj.weight", "attn_output.weight", spec.hidden))
    yield vector("mlp_norm", part("post_attention_layernorm.weight", "ffn_norm.weight", spec.hidden))
    yield matrix(
        "gate_up",
        spec.hidden,
        part("mlp.gate_proj.weight", "ffn_gate.weight", spec.ffn),
        part("mlp.up_proj.weight", "ffn_up.weight", spec.ffn),
    )
    yield matrix("down", spec.ffn, part("mlp.down_proj.weight", "ffn_down.weight", spec.hidden))
