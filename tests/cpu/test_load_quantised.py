"""GGUF tensors that stay quantised in memory: which form each slot takes, and that every value is the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import PlainTable, gguf_file, gguf_values, hf_folder, hf_model, load
from kernel_cases import open_table
from local_engine import GREEDY, LocalEngine, request

from janus_server.errors import BadModel
from janus_server.kernels.table import Band, DType, Form
from janus_server.model.load import open_checkpoint, plan_layout
from janus_server.model.weights import form_names

# Row lengths that Q4_K and Q6_K can cut into blocks of 256; heads of 32.
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
FORMS = {"Q4_0": Form.Q4_1, "Q4_1": Form.Q4_1, "Q8_0": Form.Q8_0, "Q4_K": Form.Q4_K, "Q6_K": Form.Q6_K}
# As usual files mix them: v and down in more bits than the rest.
MIXED = {
    "attn_v": "Q6_K",
    "ffn_down": "Q6_K",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q4_1",
    "attn_output": "F16",
    "output": "Q8_0",
}


@pytest.fixture(scope="module")
def native() -> Any:
    return open_table("cpu", threads=2)


def matrices(weights: Any) -> dict[str, Any]:
    """Every matrix of a one-layer model by slot name."""
    layer = weights.layers[0]
    found = {name: getattr(layer, name) for name in ("qkv", "o", "gate_up", "down")}
    return {**found, "embed": weights.embed, "head": weights.head}


def wanted_values(path: Path) -> dict[str, np.ndarray]:
    values = gguf_values(path, head_dim=32)

    def stack(*names: str) -> np.ndarray:
        return np.concatenate([values[f"blk.0.{name}"] for name in names])

    return {
        "embed": values["token_embd"], "head": values["output"], "qkv": stack("attn_q", "attn_k", "attn_v"),
        "o": stack("attn_output"), "gate_up": stack("ffn_gate", "ffn_up"), "down": stack("ffn_down"),
    }  # fmt: skip


@pytest.mark.parametrize("quant", FORMS)
def test_every_encoding_keeps_its_values(tmp_path: Path, native: Any, quant: str) -> None:
    gguf_file(tmp_path / "m.gguf", hf_model("LlamaForCausalLM", num_hidden_layers=1, **WIDE), "llama", quant)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    weights, placed, _ = load(checkpoint, native, threads=2)
    assert checkpoint.as_stored and checkpoint.spec.dtype is DType.BF16 and form_names(placed) == FORMS[quant].label
    wanted = wanted_values(tmp_path / "m.gguf")
    for name, matrix in matrices(weights).items():
        assert [band.form for band in matrix.bands] == [FORMS[quant]]
        # Equal, not of equal bits: a Q4_0 zero may change its sign.
        np.testing.assert_array_equal(native.read_rows(matrix), wanted[name], err_msg=name)


def test_a_slot_of_several_encodings(tmp_path: Path, native: Any) -> None:
    model = hf_model("LlamaForCausalLM", num_hidden_layers=1, **WIDE)
    gguf_file(tmp_path / "m.gguf", model, "llama", "Q4_K", quants=MIXED)
    weights, placed, _ = load(open_checkpoint(tmp_path / "m.gguf"), native)
    found = matrices(weights)
    assert found["qkv"].bands == (Band(Form.Q4_K, 256 + 64), Band(Form.Q6_K, 64))
    assert found["gate_up"].bands == (Band(Form.Q4_1, 1024),)
    assert found["o"].bands == (Band(Form.BF16, 256),) and found["head"].bands == (Band(Form.Q8_0, 320),)
    wanted = wanted_values(tmp_path / "m.gguf")
    for name, matrix in found.items():
        exact = 0.0 if name != "o" else 2**-8
        np.testing.assert_allclose(native.read_rows(matrix), wanted[name], rtol=exact, err_msg=name)
    assert form_names(placed) == "q4_1 + q4_k + q6_k + q8_0 + bfloat16"


def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, native: Any) -> None:
    """Bit for bit, with prompts, steps and batches through both: a product does not know how its weights are kept."""
    gguf_file(tmp_path / "m.gguf", hf_model("LlamaForCausalLM", **WIDE), "llama", "Q4_K", quants={"attn_v": "Q6_K"})
    tokens = [int(t) for t in np.random.default_rng(2).integers(3, 300, 60)]
    found = []
    for settings in ({"dtype": DType.F32}, {"rest": DType.F32}):
        engine = LocalEngine(tmp_path / "m.gguf", native, **settings)
        logits = engine.logits_of(tokens, [40, 1, 1, 18])
        prompts = [request(f"r{i}", tokens[: 5 + i], 4, sampling=GREEDY) for i in range(20)]
        engine.generate(*prompts)
        found.append((logits, {name: np.stack(rows) for name, rows in engine.rows.items()}))
    (plain, plain_rows), (kept, kept_rows) = found
    assert np.isfinite(plain).all() and kept.tobytes() == plain.tobytes()
    assert kept_rows.keys() == plain_rows.keys() and len(kept_rows) == 20
    assert all(kept_rows[name].tobytes() == rows.tobytes() for name, rows in plain_rows.items())


def test_what_is_dequantised_all_the_same(tmp_path: Path, native: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, hf_model("LlamaForCausalLM", num_hidden_layers=1, **WIDE), "llama", "Q8_0")
    for dtype, form in ((DType.F32, Form.F32), (DType.BF16, Form.BF16)):
        assert form_names(plan_layout(open_checkpoint(path, dtype), native)) == form.label
    for table, name in (
        (open_table("torch_ref"), "bfloat16"),
        (PlainTable(), "bfloat16"),
        (PlainTable(Form.BF16, Form.Q8_0), "q8_0"),
        (PlainTable(Form.BF16, Form.Q4_1), "bfloat16"),
    ):
        assert form_names(plan_layout(open_checkpoint(path), table)) == name


def test_borders_inside_a_panel_make_a_slot_plain(tmp_path: Path, native: Any) -> None:
    odd = {
        "hidden_size": 64,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    model = hf_model("Qwen2ForCausalLM", num_hidden_layers=1, **odd)
    gguf_file(tmp_path / "m.gguf", model, "qwen2", "Q8_0", quants={"attn_k": "Q4_1"})
    weights, _, _ = load(open_checkpoint(tmp_path / "m.gguf"), native)
    found = matrices(weights)
    assert found["qkv"].bands == (Band(Form.BF16, 56),)  # q's 40 rows end inside a panel
    assert found["gate_up"].bands == (Band(Form.Q8_0, 96),)
    assert found["down"].bands == found["o"].bands == (Band(Form.BF16, 64),)  # 48 and 40 are no whole blocks: F16
    values = gguf_values(tmp_path / "m.gguf")
    near = np.concatenate([values[f"blk.0.attn_{p}"] for p in "qkv"])
    np.testing.assert_allclose(native.read_rows(found["qkv"]), near, rtol=2**-8)


def test_equal_forms_need_no_border(tmp_path: Path, native: Any) -> None:
    """q of 40 rows and k and v of 8 in one encoding: chunks begin inside parts, whole heads are put in order."""
    odd = {
        "hidden_size": 160,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 64,
    }
    gguf_file(tmp_path / "m.gguf", hf_model("LlamaForCausalLM", num_hidden_layers=1, **odd), "llama", "Q8_0")
    weights, _, _ = load(open_checkpoint(tmp_path / "m.gguf"), native)
    assert weights.layers[0].qkv.bands == (Band(Form.Q8_0, 56),)
    values = gguf_values(tmp_path / "m.gguf", head_dim=8)
    wanted = np.concatenate([values[f"blk.0.attn_{p}"] for p in "qkv"])
    np.testing.assert_array_equal(native.read_rows(weights.layers[0].qkv), wanted)


def test_threads_change_nothing(tmp_path: Path, native: Any) -> None:
    gguf_file(tmp_path / "m.gguf", hf_folder(tmp_path, **WIDE), "llama", "Q4_K", quants=MIXED)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    np.testing.assert_array_equal(load(checkpoint, native, threads=1)[2], load(checkpoint, native, threads=4)[2])


def with_scale(path: Path, tensor: str, row: int, bits: int, at: int = 0) -> None:
    """Write a half float into the first block of a tensor's row."""
    entry = open_checkpoint(path).tensors[tensor]
    raw = bytearray(path.read_bytes())
    start = entry.offset + row * entry.encoding.row_bytes(entry.shape[1]) + at
    raw[start : start + 2] = bits.to_bytes(2, "little")
    path.write_bytes(raw)


@pytest.mark.parametrize("quant", FORMS)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00])
def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path, native: Any, quant: str, bits: int) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, hf_model("LlamaForCausalLM", num_hidden_layers=1, **WIDE), "llama", quant)
    with_scale(path, "blk.0.ffn_up.weight", 37, bits, 208 if quant == "Q6_K" else 0)
    with pytest.raises(BadModel, match=f"blk.0.ffn_up.weight' holds a NaN.*{FORMS[quant].label}, first in row 37"):
        load(open_checkpoint(path), native, threads=2)


def test_a_q4_0_scale_whose_offset_no_half_float_holds(tmp_path: Path, native: Any) -> None:
    path = tmp_path / "m.gguf"
    gguf_file(path, hf_model("LlamaForCausalLM", num_hidden_layers=1, **WIDE), "llama", "Q4_0")
    with_scale(path, "blk.0.ffn_down.weight", 5, 0x7000)  # 8192
    with pytest.raises(BadModel, match=r"ffn_down.weight' holds .* too large for q4_1, first in row 5"):
        load(open_checkpoint(path), native)
    assert load(open_checkpoint(path, DType.BF16), native)
