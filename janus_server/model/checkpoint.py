"""Opens a checkpoint: reads its configs and headers and checks all of it before a byte of memory is asked for.

`lifecycle` calls `open_checkpoint`. A checkpoint that opens fits its layout: every tensor is there with its shape and a
readable encoding, inside its file, sharing no byte. It must never read tensor data (but for one small vector of
rotary factors), map a file, or run anything that a model folder holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import numpy as np

from janus_server.errors import BadModel
from janus_server.kernels.table import DType
from janus_server.model import gguf, safetensors
from janus_server.model.dequant import VECTOR_ENCODINGS
from janus_server.model.spec import ModelSpec, from_gguf, from_hf
from janus_server.model.stored import Encoding, TensorEntry, is_unchanged, open_unchanged, read_small_file
from janus_server.model.weights import Part, SlotKind, slot_plans

CONFIG_LIMIT_BYTES: Final = 4 << 20
# Three of these of each tensor tell its contents: some thousand reads, 5 ms from the page cache.
SAMPLE_BYTES: Final = 512
ROPE_FREQS: Final = "rope_freqs.weight"


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose headers were read and checked against its spec; nothing is open.

    spec.dtype is the model's: what weights will be stored as that are not kept as they are. as_stored is True where
    quantised tensors may be kept in their blocks. tensors are under their own names (GGUF names when is_gguf). The
    tokenizer comes from tokenizer_folder, or for a GGUF file from metadata. total_bytes are the bytes that loading
    reads; fingerprint is a digest of file names, sizes, configs and headers, not of the weights themselves.
    """

    path: Path
    spec: ModelSpec
    is_gguf: bool
    tokenizer_folder: Path | None
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    fingerprint: str
    total_bytes: int
    as_stored: bool = False

    def source(self, part: Part) -> TensorEntry:
        return self.tensors[part.gguf if self.is_gguf else part.hf]


def open_checkpoint(path: Path, dtype: DType | None = None) -> Checkpoint:
    """Read and check a GGUF file, a folder with one, or a Hugging Face folder. Only headers and configs are read.

    dtype None keeps float32 checkpoints in float32, quantised tensors as they are where the kernel table can hold them,
    and stores everything else as bfloat16. A dtype asked for is what all weights become.
    """
    if not path.exists():
        raise BadModel(f"{path} does not exist.")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise BadModel(f"{path} has no config.json and {len(files)} .gguf files; one of either is needed.")
        path = files[0]
    opened = _open_folder(path) if path.is_dir() else _open_gguf(path)
    needed = _check_tensors(opened)
    stored = _stored_dtype(needed.values())
    spec = msgspec.structs.replace(opened.spec, dtype=dtype or stored)
    total_bytes = sum(entry.nbytes for entry in needed.values())
    return dataclasses.replace(opened, spec=spec, tensors=needed, total_bytes=total_bytes, as_stored=dtype is None)


def as_it_is_now(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint where its files are, or the same one opened anew where equal ones lie in their place.

    A folder may go and come back. OSError while a file is not there, BadModel where it is another checkpoint.
    """
    if all(is_unchanged(stamp) for stamp in {entry.file for entry in checkpoint.tensors.values()}):
        return checkpoint
    now = open_checkpoint(checkpoint.path, None if checkpoint.as_stored else checkpoint.spec.dtype)
    if now.fingerprint != checkpoint.fingerprint:
        raise BadModel(f"{checkpoint.path.name} is another checkpoint now; restart the server to serve it.")
    return now


def contents_of(checkpoint: Checkpoint) -> str:
    """A digest of samples of every tensor's stored bytes: two trainings of one architecture have equal headers.

    BadModel where a file cannot be read.
    """
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        stamps = {entry.file for entry in checkpoint.tensors.values()}
        files = {stamp: stack.enter_context(open_unchanged(stamp)) for stamp in stamps}
        for entry in sorted(checkpoint.tensors.values(), key=lambda entry: (entry.file.path.name, entry.offset)):
            count = min(SAMPLE_BYTES, entry.nbytes)
            last = entry.nbytes - count
            for at in (0, last // 2, last):
                digest.update(files[entry.file].read(entry.offset + at, count))
    return digest.hexdigest()


def _open_folder(folder: Path) -> Checkpoint:
    config = read_small_file(safetensors.resolve_inside(folder, "config.json"), CONFIG_LIMIT_BYTES)
    generation = b""
    if (folder / "generation_config.json").exists():
        path = safetensors.resolve_inside(folder, "generation_config.json")
        generation = read_small_file(path, CONFIG_LIMIT_BYTES)
    spec = from_hf(
        safetensors.parse_json_object(config, "config.json"),
        safetensors.parse_json_object(generation, "generation_config.json") if generation else None,
    )
    tensors = safetensors.read_folder(folder)
    return Checkpoint(
        path=folder,
        spec=spec,
        is_gguf=False,
        tokenizer_folder=folder,
        metadata=MappingProxyType({}),
        tensors=tensors,
        fingerprint=_fingerprint((config, generation), tensors.values()),
        total_bytes=0,
    )


def _open_gguf(path: Path) -> Checkpoint:
    header = gguf.read_header(path)
    splits = header.metadata.get("split.count", 1)
    if splits not in (0, 1):
        raise BadModel(
            f"{path.name} is one of {str(splits)[:20]} parts of a split model; join them into one file first."
        )
    spec = from_gguf(header.metadata, header.tensors.keys())
    factors = header.tensors.get(ROPE_FREQS)
    if factors is not None:
        rope = msgspec.structs.replace(spec.rope, freq_factors=_read_freq_factors(factors, spec.head_dim))
        spec = msgspec.structs.replace(spec, rope=rope)
    return Checkpoint(
        path=path,
        spec=spec,
        is_gguf=True,
        tokenizer_folder=None,
        metadata=MappingProxyType(header.metadata),
        tensors=header.tensors,
        fingerprint=_fingerprint((header.digest,), header.tensors.values()),
        total_bytes=0,
    )


def _read_freq_factors(entry: TensorEntry, head_dim: int) -> tuple[float, ...]:
    """Llama 3's rotary scaling as GGUF keeps it: one divisor per pair, float32 [head_dim/2]."""
    if entry.encoding is not Encoding.F32 or entry.shape != (head_dim // 2,):
        raise BadModel(f"tensor {entry.name!r} must be F32 of shape [{head_dim // 2}].")
    with open_unchanged(entry.file) as file:
        factors = np.frombuffer(file.read(entry.offset, entry.nbytes), "<f4").astype(np.float64)
    if not (np.isfinite(factors) & (factors > 0.0)).all():
        raise BadModel(f"tensor {entry.name!r} must hold positive finite numbers.")
    return tuple(factors.tolist())


def _check_tensors(opened: Checkpoint) -> dict[str, TensorEntry]:
    """The tensors that the layout reads, each with the shape and an encoding that it wants; nothing unknown beside."""
    needed: dict[str, TensorEntry] = {}
    for plan in slot_plans(opened.spec):
        for part in plan.parts:
            name = part.gguf if opened.is_gguf else part.hf
            entry = opened.tensors.get(name)
            if entry is None:
                raise BadModel(f"{opened.path.name}: tensor {name!r} is missing.")
            shape = (part.rows,) if plan.kind is SlotKind.VECTOR else (part.rows, plan.k)
            if entry.shape != shape:
                raise BadModel(f"tensor {name!r} has shape {list(entry.shape)}; the config asks for {list(shape)}.")
            if plan.kind is SlotKind.VECTOR and entry.encoding not in VECTOR_ENCODINGS:
                raise BadModel(f"tensor {name!r} is {entry.encoding.label}; a vector must be F32, F16 or BF16.")
            needed[name] = entry
    for name in opened.tensors:
        if name not in needed and not _is_harmless(name, opened):
            raise BadModel(
                f"{opened.path.name}: tensor {name!r:.120} is not part of a {opened.spec.family.value} model of "
                f"{opened.spec.n_layers} layers."
            )
    return needed


def _is_harmless(name: str, opened: Checkpoint) -> bool:
    """Tensors that repeat what is known: rotary buffers, a stored head where it is tied to the embedding."""
    if opened.is_gguf:
        return name == ROPE_FREQS
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and opened.spec.tied_embeddings)


def _stored_dtype(entries: Iterable[TensorEntry]) -> DType:
    return DType.F32 if all(entry.encoding is Encoding.F32 for entry in entries) else DType.BF16


def _fingerprint(texts: Iterable[bytes], entries: Iterable[TensorEntry]) -> str:
    """sha256 over the configs and over every header line: names, encodings, shapes, places, file names and sizes."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(b"%d:" % len(text) + text)
    for e in sorted(entries, key=lambda entry: entry.name):
        line = (e.name, e.encoding.label, e.shape, e.offset, e.nbytes, e.file.path.name, e.file.size_bytes)
        digest.update(repr(line).encode())
    return digest.hexdigest()
