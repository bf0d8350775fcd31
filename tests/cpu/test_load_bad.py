"""Checkpoints that lie: each is refused with a sentence that names the culprit, before memory is taken."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import gguf_file, hf_folder, load
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from janus_server.errors import BadModel
from janus_server.model import gguf, safetensors
from janus_server.model.load import open_checkpoint

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hf_folder(tmp_path)
    return tmp_path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file in place, keeping its data."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    put_header(path, json.dumps(header).encode(), raw[8 + size :])


def put_header(path: Path, text: bytes, data: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def refuse(path: Path, match: str) -> None:
    """Opening is refused with that sentence, having allocated little."""
    tracemalloc.start()
    try:
        with pytest.raises(BadModel, match=match):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h.pop(Q_PROJ), "covers? "),
        (lambda h: h[Q_PROJ].update(shape=[32, 128]), f"{Q_PROJ}.*shape"),
        (lambda h: h[Q_PROJ].update(shape=[64, 65]), f"{Q_PROJ}.*cannot take"),
        (lambda h: h[Q_PROJ].update(shape=[-64, -64]), f"{Q_PROJ}.*whole numbers"),
        (lambda h: h[Q_PROJ].update(shape=[1 << 62, 1 << 62]), f"{Q_PROJ}.*impossible"),
        (lambda h: h[Q_PROJ].update(shape=[True, 4096]), f"{Q_PROJ}.*whole numbers"),
        (lambda h: h[Q_PROJ].update(shape=[1] * 9), f"{Q_PROJ}.*impossible"),
        (lambda h: h[Q_PROJ].update(shape=[]), f"{Q_PROJ}.*cannot take"),
        (lambda h: h[Q_PROJ].update(shape=[0, 64]), f"{Q_PROJ}.*cannot take"),
        (lambda h: h[Q_PROJ].update(dtype="I64"), f"{Q_PROJ}.*I64"),
        (lambda h: h[Q_PROJ].update(dtype="BF16"), f"{Q_PROJ}.*cannot take"),
        (lambda h: h[Q_PROJ].update(dtype=None), f"{Q_PROJ}.*dtype"),
        (lambda h: h[Q_PROJ].update(data_offsets=[0, 1 << 60]), f"{Q_PROJ}.*outside"),
        (lambda h: h[Q_PROJ].update(data_offsets=[16384, 0]), f"{Q_PROJ}.*outside"),
        (lambda h: h[Q_PROJ].update(data_offsets=[0]), f"{Q_PROJ}.*outside"),
        (lambda h: h[Q_PROJ].update(data_offsets="0"), f"{Q_PROJ}.*data_offsets"),
        (lambda h: h.update({Q_PROJ: [1]}), f"{Q_PROJ}.*object"),
        (lambda h: h.update({"__metadata__": []}), "__metadata__"),
        (lambda h: h[Q_PROJ].update(data_offsets=h[K_PROJ]["data_offsets"], shape=[32, 64]), "overlaps"),
    ],
)  # fmt: skip
def test_safetensors_headers_that_lie(folder: Path, change: Callable[[dict[str, Any]], None], match: str) -> None:
    rewrite(weights_file(folder), change)
    refuse(folder, match)


def test_truncated_safetensors(folder: Path) -> None:
    path = weights_file(folder)
    raw = path.read_bytes()
    for length in (0, 7, 8, 100, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:length])
        refuse(folder, "truncated|too few|claims")
    path.write_bytes(raw + b"x")
    refuse(folder, "covers?")


def test_header_lengths_that_are_huge(folder: Path) -> None:
    path = weights_file(folder)
    for length in (1 << 20, 100_000_001, 1 << 62, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
        refuse(folder, f"claims {length} bytes")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"t": {"dtype": "F32", "dtype": "F16"}}', "'dtype' is given twice"),
        (b"[" * 100_000, "JSON"), (b'{"a": ', "JSON"), (b"\xff\xfe", "JSON"), (b"[1]", "object"), (b"", "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "JSON|object"),
    ],
)  # fmt: skip
def test_headers_that_are_not_json(folder: Path, text: bytes, match: str) -> None:
    put_header(weights_file(folder), text, b"")
    refuse(folder, match)


def test_missing_extra_and_tied_tensors(folder: Path) -> None:
    def drop(header: dict[str, Any]) -> None:
        # The dropped tensor's bytes go to a harmless buffer, so that nothing but its name is missing.
        header["model.layers.0.self_attn.rotary_emb.inv_freq"] = header.pop(Q_PROJ)

    rewrite(weights_file(folder), drop)
    refuse(folder, f"'{Q_PROJ}' is missing")
    hf_folder(folder)
    rewrite(weights_file(folder), lambda h: h.update({"model.layers.2.extra": h.pop("lm_head.weight")}))
    refuse(folder, "lm_head.weight' is missing")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    refuse(folder, "model.layers.2.extra' is not part of a llama model of 2 layers")
    hf_folder(folder)
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert load(open_checkpoint(folder))[0].head is not None  # a stored head beside tied embeddings is harmless


def test_config_and_weights_disagree(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value, match in (
        ("vocab_size", 321, "embed_tokens.weight' has shape \\[320, 64\\]; the config asks for \\[321, 64\\]"),
        ("num_hidden_layers", 3, "model.layers.2.* is missing"),
        ("num_hidden_layers", 1, "model.layers.1.* is not part"),
        ("architectures", ["Qwen2ForCausalLM"], "q_proj.bias' is missing"),
        ("head_dim", 8, "q_proj.weight' has shape"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, key: value}))
        refuse(folder, match)
    (folder / "config.json").write_text('{"hidden_size": NaN}')
    refuse(folder, "config.json")
    (folder / "config.json").write_text(" " * (5 << 20))
    refuse(folder, "config.json has")


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b", "..", "", "x\\y", "a\0b"])
def test_shards_may_not_leave_the_folder(folder: Path, name: str) -> None:
    weights_file(folder).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    refuse(folder, "plain file name")


def test_links_may_not_leave_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = tmp_path_factory.mktemp("outside") / "model.safetensors"
    weights_file(folder).rename(outside)
    weights_file(folder).symlink_to(outside)
    refuse(folder, "outside the model's folder")
    weights_file(folder).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: "s"}}))
    (folder / "s").symlink_to(folder / "s")
    refuse(folder, "'s'|s cannot be")


def test_indices_that_lie(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    weights_file(folder).rename(folder / "a.safetensors")
    for weight_map, match in (
        (None, "weight_map"),
        ({Q_PROJ: 3}, "weight_map"),
        ({"nothing": "a.safetensors"}, "'nothing' in a.safetensors"),
        ({Q_PROJ: "gone.safetensors"}, "gone.safetensors cannot be opened"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refuse(folder, match)
    (folder / "b.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    index.write_text(json.dumps({"weight_map": {Q_PROJ: "a.safetensors", "lm_head.weight": "b.safetensors"}}))
    refuse(folder, "is in both a.safetensors and b.safetensors")


def test_things_that_are_not_checkpoints(folder: Path) -> None:
    refuse(folder / "nowhere", "does not exist")
    weights_file(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    refuse(folder, "no model.safetensors")
    os.mkfifo(weights_file(folder))
    refuse(folder, "not a regular file")
    refuse(folder / "pytorch_model.bin", "at byte 0 claims|not a GGUF file")
    (folder / "config.json").unlink()
    refuse(folder, "no config.json and 0 .gguf files")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_that_are_not_numbers(tmp_path: Path, value: float, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hf_folder(tmp_path, "LlamaForCausalLM", dtype)
    tensors = load_file(weights_file(tmp_path))
    for name, at in (("model.layers.1.self_attn.k_proj.weight", (17, 3)), ("model.norm.weight", (5,))):
        broken = {**tensors, name: tensors[name].clone()}
        broken[name][at] = value
        save_file(broken, weights_file(tmp_path))
        with pytest.raises(BadModel, match=f"{name}' holds a NaN.*first in row {at[0]}"):
            load(open_checkpoint(tmp_path), threads=2)
    assert torch.isfinite(tensors["model.norm.weight"]).all()


def test_a_file_that_changes_between_open_and_load(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    with weights_file(folder).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadModel, match=r"model.safetensors changed"):
        load(checkpoint)


# GGUF headers written by hand, so that every field can lie.


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def info(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ROOM = bytes(4096)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "claims 4 bytes"), (b"GGML" + ROOM, "not a GGUF"), (header(version=1) + ROOM, "version 1"),
        (header(version=0x03000000) + ROOM, "version"), (header(tensors=1 << 40), f"{1 << 40} tensors"),
        (header(keys=1 << 63), "metadata keys"), (header(keys=1) + struct.pack("<Q", 1 << 60) + ROOM, "claims"),
        (header(keys=1) + text("k") + struct.pack("<IQ", 8, 1 << 60) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IQ", 8, 8000) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 4, 1 << 40) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 40) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 8, 1 << 21) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQQ", 9, 8, 2, 1 << 62) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQ", 9, 9, 1 << 21) + ROOM, "'k'"),
        (header(keys=1) + text("k") + struct.pack("<IIQIQIQ", 9, 9, 1, 9, 1, 9, 1) + ROOM, "nests"),
        (header(keys=1) + text("k") + struct.pack("<I", 99) + ROOM, "unknown value type 99"),
        (header(keys=1) + struct.pack("<Q", 2) + b"\xff\xfe" + ROOM, "UTF-8"),
        (header(keys=1) + text("k") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff" + ROOM, "'k'.*UTF-8"),
        (header(keys=2) + (text("k") + struct.pack("<II", 4, 1)) * 2 + ROOM, "'k' is given twice"),
        (header(1, 1) + text("general.alignment") + struct.pack("<II", 4, 3) + info() + ROOM, "alignment"),
        (header(1, 1) + text("general.alignment") + struct.pack("<II", 4, 0) + info() + ROOM, "alignment"),
        (header(1) + info(dims=()) + ROOM, "'t' has 0 dimensions"),
        (header(1) + info(dims=(1,) * 5) + ROOM, "'t' has 5"),
        (header(1) + info(dims=(32, 0)) + ROOM, "'t' has the impossible shape"),
        (header(1) + info(dims=(1 << 60, 1 << 60)) + ROOM, "'t' has the impossible shape"),
        (header(1) + info(dims=(1 << 39,)) + ROOM, "'t' ends at"),
        (header(1) + info(kind=14, dims=(100,)) + ROOM, "Q6_K"),
        (header(1) + info(kind=10, dims=(256,)) + ROOM, "'t' has the type Q2_K"),
        (header(1) + info(kind=77) + ROOM, "'t' has the type number 77"),
        (header(1) + info(offset=1 << 62) + ROOM, "'t' ends at"), (header(1) + info(offset=5) + ROOM, "'t' starts at"),
        (header(2) + info() * 2 + ROOM, "'t' is given twice"), (header(2) + info() + info("u") + ROOM, "overlaps"),
        (header(2) + info() + info("u", offset=96) + ROOM, "overlaps"), (header(2) + info(), "claims"),
    ],
)  # fmt: skip
def test_gguf_headers_that_lie(tmp_path: Path, raw: bytes, match: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    refuse(path, match)


def test_truncated_and_split_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, hf_folder(tmp_path))
    raw = path.read_bytes()
    for length in (3, 20, 1000, len(raw) // 2, len(raw) - 64):
        path.write_bytes(raw[:length])
        refuse(path, "truncated|claims")
    path.write_bytes(header(keys=1) + text("split.count") + struct.pack("<IH", 2, 4) + ROOM)
    refuse(path, "parts of a split model")


def test_gguf_with_unknown_tensors_or_a_quantised_norm(tmp_path: Path) -> None:
    model = hf_folder(tmp_path, tie_word_embeddings=True)
    gguf_file(tmp_path / "m.gguf", model, extra={"blk.0.attn_q.bias": np.zeros(64, np.float32)})
    refuse(tmp_path / "m.gguf", "blk.0.attn_q.bias' is not part")
    gguf_file(tmp_path / "n.gguf", model)
    raw = (tmp_path / "n.gguf").read_bytes()
    at = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert raw[at : at + 4] == bytes(4)
    (tmp_path / "n.gguf").write_bytes(raw[:at] + struct.pack("<I", 8) + raw[at + 4 :])
    refuse(tmp_path / "n.gguf", "output_norm.weight' is Q8_0; a vector")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes, int]:
    """A folder to scribble in, a small safetensors file, a small GGUF file, and how many of its bytes are header."""
    folder = tmp_path_factory.mktemp("fuzz")
    gguf_file(folder / "m.gguf", hf_folder(folder, num_hidden_layers=1))
    raw = (folder / "m.gguf").read_bytes()
    start = min(entry.offset for entry in gguf.read_header(folder / "m.gguf").tensors.values())
    return folder, weights_file(folder).read_bytes(), raw, start


FLIPS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=8)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def survives(read: Callable[[Path], Any], path: Path, raw: bytearray, flips: list[tuple[int, int]], span: int) -> None:
    """Reading the damaged file gives a result or `BadModel`, within a bounded amount of memory."""
    for at, value in flips:
        raw[at % span] = value
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        read(path)
    except BadModel as refusal:
        assert str(refusal)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


@FUZZ
@given(flips=FLIPS)
def test_damaged_safetensors_headers(originals: tuple[Path, bytes, bytes, int], flips: list[tuple[int, int]]) -> None:
    folder, raw, _, _ = originals
    span = 8 + int.from_bytes(raw[:8], "little")
    survives(safetensors.read_header, folder / "fuzz.safetensors", bytearray(raw), flips, span)


@FUZZ
@given(flips=FLIPS)
def test_damaged_gguf_headers(originals: tuple[Path, bytes, bytes, int], flips: list[tuple[int, int]]) -> None:
    folder, _, raw, start = originals
    survives(open_checkpoint, folder / "fuzz.gguf", bytearray(raw), flips, start)


@FUZZ
@given(noise=st.binary(max_size=200))
def test_noise_after_the_magic(originals: tuple[Path, bytes, bytes, int], noise: bytes) -> None:
    folder = originals[0]
    survives(gguf.read_header, folder / "noise.gguf", bytearray(header(2, 2) + noise), [(0, ord("G"))], 1)
    text_bytes = len(noise).to_bytes(8, "little") + noise
    survives(safetensors.read_header, folder / "noise.safetensors", bytearray(text_bytes), [(7, 0)], 8)
