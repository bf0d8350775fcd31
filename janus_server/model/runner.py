"""Runs one Batch of one model: page copies, input arrays, the decoder, the sampler. The executor's hands.

Lives on the device thread. It turns the Batcher's records into arrays and the logits into `Sampled` records; it decides
nothing and owns no pages.
"""

from __future__ import annotations

import numpy as np

from janus_server.kernels.table import Kernels, StepInputs
from janus_server.model.decoder import Decoder
from janus_server.model.sample import sample
from janus_server.types import Batch, Chunk, Sampled


class Runner:
    """One model's decoder together with the slab its cache lies in."""

    def __init__(self, decoder: Decoder, kernels: Kernels, slab: np.ndarray, page_bytes: int) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._slab = slab
        self._page_bytes = page_bytes

    def run(self, batch: Batch) -> list[Sampled]:
        """Execute the step; results in the order of the chunks that sample."""
        logits = self.logits(batch)
        specs = [chunk.sample for chunk in batch.chunks if chunk.sample is not None]
        return sample(logits, specs) if specs else []

    def logits(self, batch: Batch) -> np.ndarray:
        """Execute the step up to the logits of its sampled rows, [R, vocab] f32, valid until the next step."""
        for copy in batch.copies:
            self._kernels.copy_pages(self._slab, self._page_bytes, copy.source, copy.target)
        ids, inputs, rows = step_arrays(batch.chunks)
        return self._decoder.forward(ids, inputs, rows)


def step_arrays(chunks: tuple[Chunk, ...]) -> tuple[np.ndarray, StepInputs, np.ndarray]:
    """Token ids [N], where they belong, and the row numbers [R] whose logits are wanted; all int32.

    Example: chunks of 3 and 1 tokens at starts 5 and 9 give positions [5, 6, 7, 9], query_start [0, 3, 4] and
    row_sequence [0, 0, 0, 1].
    """
    counts = np.array([len(c.tokens) for c in chunks], dtype=np.int32)
    starts = np.array([c.start for c in chunks], dtype=np.int32)
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    n = int(query_start[-1])
    row_sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
    positions = np.arange(n, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
    page_table = np.zeros((len(chunks), max(len(c.pages) for c in chunks)), dtype=np.int32)
    for i, chunk in enumerate(chunks):
        page_table[i, : len(chunk.pages)] = chunk.pages
    ids = np.fromiter((t for c in chunks for t in c.tokens), dtype=np.int32, count=n)
    rows = np.array([query_start[i + 1] - 1 for i, c in enumerate(chunks) if c.sample is not None], dtype=np.int32)
    return ids, StepInputs(positions, query_start, page_table, row_sequence), rows
