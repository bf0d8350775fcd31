"""Reads the headers of safetensors files, alone or sharded, into tensor entries. Called by `load`.

Every length, shape and offset is compared with the file before anything is believed. It must never allocate by a number
from the file that the file's own size does not bound, and it never reads tensor bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from janus_server.errors import BadModel
from janus_server.model.stored import Encoding, FileStamp, OpenFile, TensorEntry, check_disjoint, read_small_file

HEADER_LIMIT_BYTES: Final = 100_000_000  # the format's own limit
INDEX_LIMIT_BYTES: Final = 64 << 20
MAX_DIMS: Final = 8
MAX_DIM: Final = 1 << 40  # keeps a product of shape numbers small enough to compute before it is compared


def read_folder(folder: Path) -> dict[str, TensorEntry]:
    """Entries of `model.safetensors`, or of the shards named by `model.safetensors.index.json`, by tensor name."""
    single = folder / "model.safetensors"
    if single.exists():
        return read_header(resolve_inside(folder, single.name))
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        raise BadModel(
            f"{folder.name} has no model.safetensors and no model.safetensors.index.json; other formats of "
            "weights (such as .bin and .pth) are not read: convert them to safetensors."
        )
    weight_map = read_json_object(index, INDEX_LIMIT_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise BadModel(f"{index.name}: 'weight_map' must map tensor names to file names.")
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_header(resolve_inside(folder, shard)).items():
            if name in entries:
                raise BadModel(f"tensor {name!r:.120} is in both {entries[name].file.path.name} and {shard}.")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries:
            raise BadModel(f"{index.name} puts tensor {name!r:.120} in {shard}, which does not have it.")
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The entries of one safetensors file, checked: inside the file, no overlap, no gap, sizes as shaped."""
    with OpenFile(path) as file:
        size_bytes = file.stamp.size_bytes
        if size_bytes < 8:
            raise BadModel(f"{path.name} has {size_bytes} bytes, too few for a safetensors file.")
        header_bytes = int.from_bytes(file.read(0, 8), "little")
        if header_bytes > min(size_bytes - 8, HEADER_LIMIT_BYTES):
            raise BadModel(
                f"{path.name}: the header claims {header_bytes} bytes of a file of {size_bytes} "
                f"(at most {HEADER_LIMIT_BYTES} are read)."
            )
        text = file.read(8, header_bytes)
        header = parse_json_object(text, path.name)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise BadModel(f"{path.name}: '__metadata__' must be an object.")
        entries = {name: _entry(name, value, 8 + header_bytes, file.stamp) for name, value in header.items()}
    _check_cover(entries, 8 + header_bytes, path.name, size_bytes)
    return entries


def resolve_inside(folder: Path, name: str) -> Path:
    """The real path of a file named by an index; it may not leave the folder, by its name or by a link.

    The one exception is the layout of the hub's own cache, where snapshots/<revision>/<file> links to blobs/<hash>.
    """
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise BadModel(f"{name!r:.120} is not a plain file name inside the model's folder.")
    try:
        root, real = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise BadModel(f"{name!r:.120} cannot be found inside the model's folder.") from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if real.parent not in allowed:
        raise BadModel(f"{name!r:.120} links to a file outside the model's folder.")
    return real


def read_json_object(path: Path, limit_bytes: int) -> dict[str, Any]:
    """A bounded JSON file that holds one object without repeated keys."""
    return parse_json_object(read_small_file(path, limit_bytes), path.name)


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """One JSON object; a repeated key, another value or text that is not JSON is `BadModel` naming `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise BadModel(f"{where}: the key {twice!r:.120} is given twice.")
        return result

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise BadModel(f"{where} is not valid JSON: {str(error)[:200]}.") from error
    if not isinstance(value, dict):
        raise BadModel(f"{where} must hold a JSON object.")
    return value


def _entry(name: str, value: object, data_start: int, stamp: FileStamp) -> TensorEntry:
    where = f"{stamp.path.name}: tensor {name!r:.120}"
    if not isinstance(value, dict):
        raise BadModel(f"{where} must be described by an object.")
    encoding = {"F32": Encoding.F32, "F16": Encoding.F16, "BF16": Encoding.BF16}.get(str(value.get("dtype")))
    if encoding is None:
        raise BadModel(f"{where} has dtype {value.get('dtype')!r:.40}; F32, F16 and BF16 are read.")
    shape = _naturals(value.get("shape"), f"{where}: 'shape'")
    offsets = _naturals(value.get("data_offsets"), f"{where}: 'data_offsets'")
    if len(shape) > MAX_DIMS or any(dim > MAX_DIM for dim in shape):
        raise BadModel(f"{where} has an impossible shape.")
    if len(offsets) != 2 or offsets[0] > offsets[1] or data_start + offsets[1] > stamp.size_bytes:
        raise BadModel(
            f"{where} lies outside the file: offsets {list(offsets[:4])} of {stamp.size_bytes - data_start} "
            "bytes of data (the file may be truncated)."
        )
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * encoding.block_bytes != nbytes:
        raise BadModel(f"{where} of shape {list(shape)} and dtype {encoding.label} cannot take {nbytes} bytes.")
    return TensorEntry(name, encoding, shape, stamp, data_start + offsets[0], nbytes)


def _naturals(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        raise BadModel(f"{where} must be a list of whole numbers.")
    return tuple(value)


def _check_cover(entries: dict[str, TensorEntry], data_start: int, file_name: str, size_bytes: int) -> None:
    """Tensors must tile the data exactly: bytes that belong to nothing could hide anything."""
    check_disjoint(entries.values())
    covered = sum(entry.nbytes for entry in entries.values())
    if data_start + covered != size_bytes:
        raise BadModel(f"{file_name} holds {size_bytes - data_start} bytes of data, its tensors cover {covered}.")
