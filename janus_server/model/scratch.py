"""The arrays of a step, laid into the scratch window that all models of a device share, and how large a step it allows.

`catalogue` plans with it, `engine` carves a model's arrays once, `decoder` computes in them. Steps of two models never
overlap on a device, so each may use the whole window; nothing in it outlives the step and its draw. Nothing here takes
memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from janus_server.errors import require
from janus_server.kernels.table import Array, DType, Kernels
from janus_server.model.spec import ModelSpec

ALIGNMENT_BYTES: Final = 64
# Rows of a step that are read at once beside the sampled ones: logits of all 512 would be 311 MB where the vocabulary
# has 152k entries, these are 19 MB.
READ_ROWS: Final = 32


@dataclasses.dataclass(frozen=True, slots=True)
class StepSize:
    """The most rows of one step, the most of them whose next token is drawn, and those read at a time beside them."""

    rows: int
    drawn: int
    read: int = READ_ROWS


# Where memory is short a step is not made smaller than this: below it a server is too slow to be of use.
SMALLEST: Final = StepSize(16, 4, 4)


@dataclasses.dataclass(frozen=True, slots=True)
class Scratch:
    """Activations of one step, [rows, …] each; taken and logits [drawn, …], read_* [read, …].

    x and act last through the step. Of the others, those of attention, of the MLP and of the head (taken, logits,
    read_*) lie over each other: at no time is more than one of the three in use.
    """

    size: StepSize
    x: Array
    act: Array
    qkv: Array
    q: Array
    attended: Array
    attended_flat: Array
    gate_up: Array
    ffn: Array
    taken: Array
    logits: Array
    read_logits: Array
    read_hidden: Array

    def first(self, n: int) -> Scratch:
        """The same memory, first n rows of a step."""
        return dataclasses.replace(
            self, x=self.x[:n], act=self.act[:n], qkv=self.qkv[:n], q=self.q[:n], attended=self.attended[:n],
            attended_flat=self.attended_flat[:n], gate_up=self.gate_up[:n], ffn=self.ffn[:n],
        )  # fmt: skip


def scratch_bytes(spec: ModelSpec, kernels: Kernels, size: StepSize) -> int:
    """How much of the window steps of that size take.

    Example (SmolLM2-135M on cpu, 512 rows, 128 drawn): 2.4 MB for x and act, and 32 MB for the head, which is more than
    the 9.4 MB of the MLP or the 4.3 MB of attention.
    """
    return max(place.end for place in _places(spec, kernels.act_dtype(spec.dtype), size).values())


def scratch_of(spec: ModelSpec, kernels: Kernels, size: StepSize, window: Array) -> Scratch:
    """The arrays of steps of that size in the window, flat uint8 of at least `scratch_bytes`."""
    places = _places(spec, kernels.act_dtype(spec.dtype), size)
    require(max(place.end for place in places.values()) <= len(window), "the scratch window is too small for the model")
    arrays = {name: kernels.view(window, place.at, place.shape, place.dtype) for name, place in places.items()}
    flat = arrays["attended"].reshape(size.rows, spec.heads * spec.head_dim)
    return Scratch(size=size, attended_flat=flat, **arrays)


def step_size(spec: ModelSpec, kernels: Kernels, wanted: StepSize, most_bytes: int) -> StepSize:
    """The largest step of at most `wanted` that fits into most_bytes, but never smaller than SMALLEST.

    Rows come first (they make prompts fast), then the rows drawn (they bound how many sequences run at once) and half
    as many read. Example (SmolLM2-135M, 512 rows and 128 drawn wanted): 16 MB give 512, 45 and 22; 4 MB give 173, 11
    and 5.
    """

    def fits(rows: int, drawn: int, read: int) -> bool:
        return scratch_bytes(spec, kernels, StepSize(rows, min(drawn, rows), min(read, rows))) <= most_bytes

    few, some = min(SMALLEST.drawn, wanted.drawn), min(SMALLEST.read, wanted.read)
    rows = _most(min(SMALLEST.rows, wanted.rows), wanted.rows, lambda n: fits(n, few, some))
    drawn = _most(min(few, rows), min(wanted.drawn, rows), lambda n: fits(rows, n, max(some, min(n // 2, wanted.read))))
    read = _most(min(some, rows), min(wanted.read, rows), lambda n: fits(rows, drawn, n))
    return StepSize(rows, drawn, read)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where an array lies in the window: its first byte, and the one after its last."""

    at: int
    shape: tuple[int, ...]
    dtype: DType

    @property
    def end(self) -> int:
        count = self.dtype.bytes
        for size in self.shape:
            count *= size
        return self.at + count


def _places(spec: ModelSpec, act: DType, size: StepSize) -> dict[str, _Place]:
    """Every array by its name in `Scratch`; each begins at a multiple of 64 bytes."""
    rows, q_width, kv_width = size.rows, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    heads = (rows, spec.heads, spec.head_dim)
    always = {"x": ((rows, spec.hidden), DType.F32), "act": ((rows, spec.hidden), act)}
    attention = {
        "qkv": ((rows, q_width + 2 * kv_width), DType.F32), "q": (heads, act), "attended": (heads, act),
    }  # fmt: skip
    mlp = {"gate_up": ((rows, 2 * spec.ffn), DType.F32), "ffn": ((rows, spec.ffn), act)}
    head = {
        "taken": ((size.drawn, spec.hidden), DType.F32), "logits": ((size.drawn, spec.vocab), DType.F32),
        "read_hidden": ((size.read, spec.hidden), DType.F32), "read_logits": ((size.read, spec.vocab), DType.F32),
    }  # fmt: skip
    places = _laid(0, always)
    base = _aligned(max(place.end for place in places.values()))
    return {**places, **_laid(base, attention), **_laid(base, mlp), **_laid(base, head)}


def _laid(at: int, arrays: Mapping[str, tuple[tuple[int, ...], DType]]) -> dict[str, _Place]:
    """One array after the other from byte `at` on."""
    places = {}
    for name, (shape, dtype) in arrays.items():
        place = places[name] = _Place(_aligned(at), shape, dtype)
        at = place.end
    return places


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number of low … high that fits, as all smaller ones do; low even where that does not."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
