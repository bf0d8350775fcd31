"""Loads a checkpoint that may lie, as the server would: the outcome, the memory it took, and whether weights are right.

`outcome` knows two ends: `BadModel` with a sentence, or weights. Whatever else is raised passes through to the target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import load

from janus_server.errors import BadModel
from janus_server.model.load import Checkpoint, Weights, open_checkpoint
from janus_server.model.stored import Encoding
from janus_server.tokens.tokenizer import Tokenizer

# What opening, loading and the tokenizer of a small file may hold at once; the honest files take a tenth of it.
MEMORY_BYTES = 24 << 20


@dataclasses.dataclass(frozen=True)
class Loaded:
    checkpoint: Checkpoint
    weights: Weights


def outcome(path: Path) -> Loaded | BadModel:
    """Open and load a checkpoint."""
    with bounded_memory():
        try:
            checkpoint = open_checkpoint(path)
            weights, _, _ = load(checkpoint)
        except BadModel as refusal:
            assert 0 < len(str(refusal)) < 1000
            return refusal
        return Loaded(checkpoint, weights)


def tokenizer_outcome(metadata: Mapping[str, Any]) -> Tokenizer | BadModel:
    """The tokenizer that a GGUF file's metadata describes, tried on a text."""
    with bounded_memory():
        try:
            tokenizer = Tokenizer.from_gguf(metadata)
            tokenizer.decode(tokenizer.encode("abc a\u00e9 <s>", add_special=True, parse_special=True), True)
        except BadModel as refusal:
            assert 0 < len(str(refusal)) < 1000
            return refusal
        return tokenizer


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES, f"{peak} bytes were held at once"


def check_weights(loaded: Loaded) -> None:
    """Rows as they are in the file, at the places that its header names, and every place inside it and apart."""
    checkpoint, weights = loaded.checkpoint, loaded.weights
    places = sorted((entry.offset, entry.offset + entry.nbytes) for entry in checkpoint.tensors.values())
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(places))
    assert all(0 < low <= high <= entry.file.size_bytes
               for entry in checkpoint.tensors.values() for low, high in [(entry.offset,
               entry.offset + entry.nbytes)])  # fmt: skip
    embed = "token_embd.weight" if checkpoint.is_gguf else "model.embed_tokens.weight"
    down = "blk.0.ffn_down.weight" if checkpoint.is_gguf else "model.layers.0.mlp.down_proj.weight"
    norm = "output_norm.weight" if checkpoint.is_gguf else "model.norm.weight"
    rows = [(embed, weights.embed.handle), (norm, weights.final_norm)]
    rows += [(down, weights.layers[0].down.handle)] if weights.layers else []
    for name, got in rows:
        expected = read(checkpoint, name)
        if expected is not None and got.dtype == np.float32:
            assert np.array_equal(expected.reshape(got.shape), got), name


def read(checkpoint: Checkpoint, name: str) -> np.ndarray | None:
    """A tensor's float32 numbers straight from the file; None for encodings that take more than a cast."""
    entry = checkpoint.tensors[name]
    kinds = {Encoding.F32: np.float32, Encoding.F16: np.float16}
    if entry.encoding not in kinds:
        return None
    raw = entry.file.path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
    return np.frombuffer(raw, kinds[entry.encoding]).astype(np.float32)
