"""Runs one Batch of one model: page copies, input arrays, the decoder, the sampler. The executor's hands.

It lives on the device thread, turns the Batcher's records into arrays and the logits into `Sampled` records, decides
nothing and owns no pages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from janus_server.kernels.table import Kernels, StepInputs
from janus_server.model.decoder import Decoder
from janus_server.model.read import pool, score
from janus_server.model.sample import sample
from janus_server.types import Batch, Chunk, Reading, Sampled, ScoreSpec


class StepArrays(NamedTuple):
    """A batch as the decoder wants it: token ids [N] int32, where they belong, and the rows [R] that are sampled."""

    ids: np.ndarray
    inputs: StepInputs
    rows: np.ndarray


class Runner:
    """One model's decoder together with the slab its cache lies in.

    A step is `stage`, `forward`, `read`, `draw`, in that order.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, slab: np.ndarray, page_bytes: int) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._slab = slab
        self._page_bytes = page_bytes

    def stage(self, batch: Batch) -> StepArrays:
        """Arrays for the step; page copies that it depends on are done here."""
        for copy in batch.copies:
            self._kernels.copy_pages(self._slab, self._page_bytes, copy.source, copy.target)
        return step_arrays(batch.chunks)

    def forward(self, arrays: StepArrays) -> np.ndarray:
        """Logits of the sampled rows, [R, vocab] f32, valid until the next step."""
        return self._decoder.forward(arrays.ids, arrays.inputs, arrays.rows)

    def read(self, batch: Batch) -> list[Reading]:
        """What is wanted of the rows that `forward` has just computed, one a chunk that is read."""
        readings: list[Reading] = []
        row = 0
        for chunk in batch.chunks:
            if isinstance(chunk.read, ScoreSpec):
                readings.append(score(self._decoder, row + chunk.read.first, chunk.read))
            elif chunk.read is not None:
                readings.append(pool(self._decoder, row + chunk.read.first, row + len(chunk.tokens), chunk.read))
            row += len(chunk.tokens)
        return readings

    def draw(self, batch: Batch, logits: np.ndarray) -> list[Sampled]:
        """One token a sampled row, in the order of the chunks."""
        specs = [chunk.sample for chunk in batch.chunks if chunk.sample is not None]
        return sample(logits, specs) if specs else []


def step_arrays(chunks: tuple[Chunk, ...]) -> StepArrays:
    """The rows of all chunks one after the other, each sequence's page table padded to the longest.

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
    return StepArrays(ids, StepInputs(positions, query_start, page_table, row_sequence), rows)
