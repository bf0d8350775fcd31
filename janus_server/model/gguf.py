"""Reads the header of a GGUF file (versions 2 and 3, little-endian) into metadata and tensor entries. Called by `load`.

Counts, lengths and nesting are bounded before they are used: a header may make this module hold a small multiple of its
own bytes, never more, and the parser knows no error but `BadModel`. It never reads tensor bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from janus_server.errors import BadModel
from janus_server.model.stored import Encoding, FileStamp, OpenFile, TensorEntry, check_disjoint

HEADER_LIMIT_BYTES: Final = 32 << 20  # the largest real vocabularies (262k tokens, merges) take about 15 MB
MAX_STRING_BYTES: Final = 16 << 20
MAX_NAME_BYTES: Final = 65535
MAX_KEYS: Final = 1 << 14
MAX_TENSORS: Final = 1 << 17
MAX_ARRAY: Final = 1 << 22
MAX_NESTING: Final = 2
MAX_DIMS: Final = 4
MAX_DIM: Final = 1 << 40
READ_STEP_BYTES: Final = 4 << 20

SCALARS: Final[Mapping[int, np.dtype[Any]]] = MappingProxyType({
    0: np.dtype("<u1"), 1: np.dtype("<i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), 7: np.dtype("?"),
    10: np.dtype("<u8"), 11: np.dtype("<i8"), 12: np.dtype("<f8"),
})  # fmt: skip
STRING: Final = 8
ARRAY: Final = 9

# Types that exist but are not read, so that the refusal can name them.
OTHER_TYPES: Final = MappingProxyType({
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
})  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF header says: metadata as plain Python values (arrays as lists) and the tensors by name.

    digest is sha256 of the header's bytes; the tensors' data starts after them, at the next multiple of the alignment.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    digest: bytes


def read_header(path: Path) -> GgufHeader:
    """Parse and check the header of one GGUF file."""
    with OpenFile(path) as file:
        cursor = _Cursor(file)
        if cursor.take(4) != b"GGUF":
            raise BadModel(f"{path.name} is not a GGUF file.")
        version = cursor.number("<I")
        if version not in (2, 3):
            raise BadModel(f"{path.name} is GGUF version {version}; little-endian versions 2 and 3 are read.")
        tensor_count = cursor.count(MAX_TENSORS, "tensors")
        key_count = cursor.count(MAX_KEYS, "metadata keys")
        metadata = _read_metadata(cursor, key_count)
        infos = [_read_info(cursor) for _ in range(tensor_count)]
        tensors = _place(infos, _alignment(metadata, path.name), cursor.position, file.stamp)
        return GgufHeader(metadata, tensors, cursor.digest())


@dataclasses.dataclass(frozen=True, slots=True)
class _Info:
    """A tensor's line in the header; offset counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    offset: int


class _Cursor:
    """A position in the header. Bytes are fetched in steps as they are needed, never past the file or the limit."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._buffer = b""
        self.position = 0
        self.where = file.stamp.path.name
        self._limit = min(file.stamp.size_bytes, HEADER_LIMIT_BYTES)

    def need(self, count: int, what: str) -> bytes:
        """The buffer, holding the file from its first byte to at least `count` bytes past the position."""
        end = self.position + count
        if end > self._limit:
            raise BadModel(
                f"{self.where}: {what} at byte {self.position} claims {count} bytes; the file has "
                f"{self._file.stamp.size_bytes} and a header may have {HEADER_LIMIT_BYTES}."
            )
        if end > len(self._buffer):
            # Doubling keeps the copying linear in the header's size.
            target = min(max(end, 2 * len(self._buffer), READ_STEP_BYTES), self._limit)
            self._buffer += self._file.read(len(self._buffer), target - len(self._buffer))
        return self._buffer

    def digest(self) -> bytes:
        """sha256 of everything before the position."""
        return hashlib.sha256(memoryview(self._buffer)[: self.position]).digest()

    def take(self, count: int, what: str = "a value") -> bytes:
        buffer = self.need(count, what)
        self.position += count
        return buffer[self.position - count : self.position]

    def number(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def count(self, limit: int, what: str) -> int:
        value = self.number("<Q")
        if value > limit:
            raise BadModel(f"{self.where} claims {value} {what}; at most {limit} are read.")
        return value

    def string(self, limit: int, what: str) -> str:
        length = self.number("<Q")
        if length > limit:
            raise BadModel(f"{self.where}: {what} claims {length} bytes; at most {limit} are read.")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadModel(f"{self.where}: {what} before byte {self.position} is not UTF-8.") from error

    def strings(self, count: int, what: str) -> list[str]:
        """An array of strings, in one tight loop: a vocabulary has a hundred thousand of them."""
        unpack = struct.Struct("<Q").unpack_from
        result: list[str] = []
        buffer = self.need(8 * count, what)
        position, available = self.position, len(buffer)
        try:
            for _ in range(count):
                # An end past the buffer is either more to fetch or a lie; `need` decides which.
                if position + 8 > available:
                    self.position = position
                    buffer = self.need(8, what)
                    available = len(buffer)
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > available:
                    self.position = start
                    buffer = self.need(position - start, what)
                    available = len(buffer)
                result.append(buffer[start:position].decode("utf-8"))
        except UnicodeDecodeError as error:
            raise BadModel(f"{self.where}: a string of {what} before byte {position} is not UTF-8.") from error
        self.position = position
        return result


def _read_metadata(cursor: _Cursor, key_count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string(MAX_NAME_BYTES, "a metadata key")
        if key in metadata:
            raise BadModel(f"{cursor.where}: the metadata key {key!r:.120} is given twice.")
        metadata[key] = _read_value(cursor, cursor.number("<I"), f"the metadata key {key!r:.80}", MAX_NESTING)
    return metadata


def _read_value(cursor: _Cursor, kind: int, what: str, nesting: int) -> Any:
    scalar = SCALARS.get(kind)
    if scalar is not None:
        return np.frombuffer(cursor.take(scalar.itemsize, what), scalar).tolist()[0]
    if kind == STRING:
        return cursor.string(MAX_STRING_BYTES, what)
    if kind != ARRAY:
        raise BadModel(f"{cursor.where}: {what} has the unknown value type {kind}.")
    if nesting == 0:
        raise BadModel(f"{cursor.where}: {what} nests arrays more than {MAX_NESTING} deep.")
    item = cursor.number("<I")
    count = cursor.count(MAX_ARRAY, f"items in {what}")
    scalar = SCALARS.get(item)
    if scalar is not None:
        return np.frombuffer(cursor.take(count * scalar.itemsize, what), scalar).tolist()
    if item == STRING:
        return cursor.strings(count, what)
    cursor.need(12 * count, what)  # the least that nested arrays can take
    return [_read_value(cursor, item, what, nesting - 1) for _ in range(count)]


def _read_info(cursor: _Cursor) -> _Info:
    name = cursor.string(MAX_NAME_BYTES, "a tensor's name")
    dims = cursor.number("<I")
    if not 1 <= dims <= MAX_DIMS:
        raise BadModel(f"{cursor.where}: tensor {name!r:.80} has {dims} dimensions; 1 to {MAX_DIMS} are read.")
    # GGUF writes the fastest-moving dimension first.
    shape = struct.unpack(f"<{dims}Q", cursor.take(8 * dims))[::-1]
    kind, offset = cursor.number("<I"), cursor.number("<Q")
    encoding = next((known for known in Encoding if known.ggml_type == kind), None)
    if encoding is None:
        label = OTHER_TYPES.get(kind, f"number {kind}")
        readable = ", ".join(known.label for known in Encoding)
        raise BadModel(f"{cursor.where}: tensor {name!r:.80} has the type {label}; {readable} are read.")
    if any(not 0 < dim <= MAX_DIM for dim in shape):
        raise BadModel(f"{cursor.where}: tensor {name!r:.80} has the impossible shape {list(shape)}.")
    if shape[-1] % encoding.block_values:
        raise BadModel(
            f"{cursor.where}: tensor {name!r:.80} has rows of {shape[-1]} values, not whole "
            f"{encoding.label} blocks of {encoding.block_values}."
        )
    return _Info(name, shape, encoding, offset)


def _alignment(metadata: dict[str, Any], where: str) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 65536 or alignment & (alignment - 1):
        raise BadModel(f"{where}: 'general.alignment' must be a power of two from 8 to 65536.")
    return alignment


def _place(infos: list[_Info], alignment: int, header_bytes: int, stamp: FileStamp) -> dict[str, TensorEntry]:
    data_start = -(-header_bytes // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for info in infos:
        where = f"{stamp.path.name}: tensor {info.name!r:.80}"
        nbytes = math.prod(info.shape) // info.encoding.block_values * info.encoding.block_bytes
        if info.name in tensors:
            raise BadModel(f"{where} is given twice.")
        if info.offset % alignment:
            raise BadModel(f"{where} starts at offset {info.offset}, not a multiple of {alignment}.")
        if data_start + info.offset + nbytes > stamp.size_bytes:
            raise BadModel(
                f"{where} ends at byte {data_start + info.offset + nbytes} of a file of {stamp.size_bytes} "
                "(the file may be truncated)."
            )
        tensors[info.name] = TensorEntry(info.name, info.encoding, info.shape, stamp, data_start + info.offset, nbytes)
    check_disjoint(tensors.values())
    return tensors
