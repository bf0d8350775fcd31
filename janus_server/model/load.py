"""Streams a checkpoint's tensors into the memory of a layout. `lifecycle` calls `load_weights` on a copy thread.

Chunks of rows are read with pread, put in our order, converted and handed to the kernel table, on several threads where
asked. It must never map a file or leave half-filled weights in use: a failure raises and the caller drops the memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from janus_server.errors import BadModel, require
from janus_server.kernels.table import PLAIN_FORM, Form, Kernels, Matrix
from janus_server.model.checkpoint import Checkpoint, open_checkpoint
from janus_server.model.dequant import KEPT_FORMS, convert_rows, finite_rows, is_plain_copy, numpy_type
from janus_server.model.stored import FileStamp, OpenFile, TensorEntry, open_unchanged
from janus_server.model.weights import (
    LayerWeights,
    Layout,
    Part,
    Slot,
    SlotKind,
    SlotPlan,
    Weights,
    bind,
    bind_slot,
    layout,
    slot_plans,
)

__all__ = ["Checkpoint", "LayerWeights", "Weights", "load_weights", "open_checkpoint", "plan_layout"]

STAGE_BYTES: Final = 1 << 20  # a core's L2 holds it, so the copy in and the pack out touch memory once

Progress = Callable[[int, int], None]


def plan_layout(checkpoint: Checkpoint, kernels: Kernels) -> Layout:
    """Where a checkpoint's weights will lie: quantised tensors as they are where that was not asked otherwise and the
    table has their form, all others as the spec's dtype."""
    forms = {
        plan.name: _part_forms(checkpoint, plan, kernels)
        for plan in slot_plans(checkpoint.spec)
        if plan.kind is SlotKind.MATRIX
    }
    return layout(checkpoint.spec, kernels.band_bytes, forms)


def load_weights(
    checkpoint: Checkpoint,
    placed: Layout,
    kernels: Kernels,
    memory: np.ndarray,
    progress: Progress,
    *,
    threads: int = 1,
) -> Weights:
    """Fill memory (flat uint8, placed.total_bytes, 64-byte aligned) from the checkpoint and return the records over it.

    progress(bytes done, bytes total) counts the checkpoint's bytes and is called on this thread only. The result does
    not depend on `threads`. A NaN or an infinity, or a file that changed since it was opened, is `BadModel`.
    """
    require(placed.dtype is checkpoint.spec.dtype, "a layout must be made from the spec of its checkpoint")
    weights = bind(placed, kernels, memory)
    with contextlib.ExitStack() as stack:
        stamps = {entry.file for entry in checkpoint.tensors.values()}
        files = {stamp: stack.enter_context(open_unchanged(stamp)) for stamp in sorted(stamps, key=lambda s: s.path)}
        loader = _Loader(checkpoint, kernels, memory, files, max(threads, 1))
        chunks = [chunk for slot in placed.entries for chunk in loader.chunks(slot)]
        progress(0, checkpoint.total_bytes)
        done = 0
        for read_bytes in loader.run_all(chunks):
            done += read_bytes
            progress(done, checkpoint.total_bytes)
    return weights


def _part_forms(checkpoint: Checkpoint, plan: SlotPlan, kernels: Kernels) -> tuple[Form, ...]:
    plain = PLAIN_FORM[checkpoint.spec.dtype]
    if not checkpoint.as_stored:
        return (plain,) * len(plan.parts)
    kept = (KEPT_FORMS.get(checkpoint.source(part).encoding, plain) for part in plan.parts)
    forms = tuple(form if form in kernels.forms else plain for form in kept)
    row = 0
    for part, form, following in zip(plan.parts, forms, forms[1:], strict=False):
        row += part.rows
        if form is not following and row % kernels.row_step(following):
            return (plain,) * len(plan.parts)
    return forms


class _Chunk(NamedTuple):
    """Rows first … last-1 of a slot, all of one form: what one staging buffer holds. matrix is None for a vector, taken
    whole."""

    slot: Slot
    matrix: Matrix | None
    form: Form
    first: int
    last: int


class _Stage:
    """One worker's buffers, kept over its chunks: fresh memory would cost a page fault for every 4 KiB of the model."""

    def __init__(self) -> None:
        self._stored = np.empty(0, np.uint8)
        self._rows = np.empty(0, np.uint8)

    def stored(self, nbytes: int) -> np.ndarray:
        """Flat uint8 for bytes as they are in the file."""
        if self._stored.size < nbytes:
            self._stored = np.empty(nbytes, np.uint8)
        return self._stored[:nbytes]

    def rows(self, count: int, k: int, form: Form) -> np.ndarray:
        """count rows of k values as the kernel table takes them."""
        nbytes = count * form.row_bytes(k)
        if self._rows.size < nbytes:
            self._rows = np.empty(nbytes, np.uint8)
        return self._rows[:nbytes].view(numpy_type(form)).reshape(count, -1)


class _Loader:
    """Streams independent chunks of rows: read, undo the file's order and encoding, hand to the kernel table."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        kernels: Kernels,
        memory: np.ndarray,
        files: Mapping[FileStamp, OpenFile],
        threads: int,
    ) -> None:
        self._checkpoint = checkpoint
        self._kernels = kernels
        self._memory = memory
        self._files = files
        self._threads = threads
        self._stages: queue.SimpleQueue[_Stage] = queue.SimpleQueue()
        for _ in range(threads):
            self._stages.put(_Stage())

    def chunks(self, slot: Slot) -> Iterator[_Chunk]:
        """Cut each band of a slot at multiples of the table's row step, wherever its parts begin."""
        if slot.kind is SlotKind.VECTOR:
            yield _Chunk(slot, None, Form.F32, 0, slot.n)
            return
        matrix, start = bind_slot(slot, self._kernels, self._memory), 0
        for band in slot.bands:
            step, end = self._kernels.row_step(band.form), start + band.rows
            rows = max(STAGE_BYTES // band.form.row_bytes(slot.k) // step, 1) * step
            for first in range(start, end, rows):
                yield _Chunk(slot, matrix, band.form, first, min(first + rows, end))
            start = end

    def run_all(self, chunks: list[_Chunk]) -> Iterator[int]:
        """Run every chunk and yield the stored bytes of each, in order."""
        if self._threads == 1:
            yield from map(self._run, chunks)
            return
        pool = concurrent.futures.ThreadPoolExecutor(self._threads, "janus-load")
        try:
            yield from pool.map(self._run, chunks)
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, chunk: _Chunk) -> int:
        stage = self._stages.get()
        try:
            if chunk.matrix is None:
                out = self._memory[chunk.slot.offset :][: chunk.slot.nbytes].view(np.float32).reshape(-1, 1)
                read_bytes = self._fill(chunk, out, stage)
                bad = int(np.count_nonzero(~np.isfinite(out)))
            else:
                out = stage.rows(chunk.last - chunk.first, chunk.slot.k, chunk.form)
                read_bytes = self._fill(chunk, out, stage)
                bad = self._kernels.store_rows(out, chunk.first, chunk.matrix)
        finally:
            self._stages.put(stage)
        if bad:
            raise BadModel(self._blame(chunk, out))
        return read_bytes

    def _fill(self, chunk: _Chunk, out: np.ndarray, stage: _Stage) -> int:
        """Fill out, a row a row of the chunk, from every part that has some; the stored bytes of those rows."""
        read_bytes = 0
        for part, low, high, at in _overlaps(chunk):
            entry = self._checkpoint.source(part)
            row_bytes = entry.encoding.row_bytes(chunk.slot.k)
            self._read_rows(part, entry, _Span(low, high, row_bytes), chunk.form, out[at : at + high - low], stage)
            read_bytes += (high - low) * row_bytes
        return read_bytes

    def _read_rows(
        self, part: Part, entry: TensorEntry, span: _Span, form: Form, out: np.ndarray, stage: _Stage
    ) -> None:
        """Rows of one tensor, in our order, in that form into out."""
        file, (low, high, row_bytes) = self._files[entry.file], span
        head = part.gguf_pairs_head_dim if self._checkpoint.is_gguf else 0
        if not head and is_plain_copy(entry.encoding, form):
            file.read_into(out.view(np.uint8).reshape(-1).data, entry.offset + low * row_bytes)
            return
        # Rows of a head are scattered over it, so whole heads are read.
        start, stop = (low // head * head, -(-high // head) * head) if head else (low, high)
        stored = stage.stored((stop - start) * row_bytes)
        file.read_into(stored.data, entry.offset + start * row_bytes)
        if head:
            stored = stored.reshape(-1, head // 2, 2, row_bytes).swapaxes(1, 2).reshape(-1, row_bytes)
        rows = stored.reshape(-1, row_bytes)[low - start : high - start]
        convert_rows(rows, entry.encoding, form, out)

    def _blame(self, chunk: _Chunk, out: np.ndarray) -> str:
        """The sentence for values that are not numbers. The stage may hold another chunk by now: rows are read anew."""
        again = np.empty_like(out)
        self._fill(chunk, again, _Stage())
        for part, low, high, at in _overlaps(chunk):
            finite = finite_rows(again[at : at + high - low], chunk.form)
            if not finite.all():
                row = low + int(np.argmin(finite))
                return (
                    f"tensor {self._checkpoint.source(part).name!r} holds a NaN, an infinity or a number too large for "
                    f"{chunk.form.label}, first in row {row}."
                )
        return f"a tensor of {chunk.slot.name} holds values that are not numbers."


class _Span(NamedTuple):
    """Rows low … high-1 of a tensor, row_bytes each in its file."""

    low: int
    high: int
    row_bytes: int


class _Overlap(NamedTuple):
    """Rows low … high-1 of a part, which are rows `at` … of the chunk."""

    part: Part
    low: int
    high: int
    at: int


def _overlaps(chunk: _Chunk) -> Iterator[_Overlap]:
    start = 0
    for part in chunk.slot.parts:
        low, high = max(chunk.first, start), min(chunk.last, start + part.rows)
        if low < high:
            yield _Overlap(part, low - start, high - start, low - chunk.first)
        start += part.rows
