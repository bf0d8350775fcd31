"""Reading a model's spec from configs: every spelling that is met in the wild, and refusals that name the key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janus_server.errors import BadModel
from janus_server.kernels.table import Band, DType, Form
from janus_server.model.rope import RopeKind, RopeSpec, inv_freq, rotary_tables
from janus_server.model.spec import Family, from_gguf, from_hf, rope_tables
from janus_server.model.weights import SlotKind, form_names, layout, layout_hash

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 172,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
GGUF: dict[str, Any] = {
    "general.architecture": "llama", "llama.block_count": 30, "llama.context_length": 8192,
    "llama.embedding_length": 576, "llama.feed_forward_length": 1536, "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3, "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.vocab_size": 49152, "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
}  # fmt: skip
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


def hf(generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
    return from_hf(config, generation)


def gguf(names: tuple[str, ...] = (), **changes: Any) -> Any:
    merged = {**GGUF, **{key.replace("__", "."): value for key, value in changes.items()}}
    return from_gguf({key: value for key, value in merged.items() if value != "absent"}, names)


def test_llama_in_full() -> None:
    spec = hf()
    assert (spec.family, spec.n_layers, spec.hidden, spec.heads, spec.kv_heads) == (Family.LLAMA, 5, 64, 8, 4)
    assert (spec.head_dim, spec.ffn, spec.vocab, spec.max_positions, spec.rms_eps) == (8, 172, 512, 512, 1e-5)
    assert spec.tied_embeddings and not spec.qkv_bias and not spec.qk_norm
    assert spec.rope == RopeSpec(theta=10000.0) and spec.dtype is DType.F32
    assert (spec.bos_id, spec.eos_ids, spec.sliding_window, spec.context_tokens) == (1, (2,), None, 512)


def test_absent_keys_take_the_classes_defaults() -> None:
    spec = hf(num_key_value_heads="absent", tie_word_embeddings="absent", torch_dtype="absent", rms_norm_eps="absent")
    assert (spec.kv_heads, spec.tied_embeddings, spec.dtype, spec.rms_eps) == (8, False, DType.BF16, 1e-6)
    assert hf(**QWEN3).head_dim == 128
    assert hf(**QWEN2, head_dim=None).head_dim == 8


@pytest.mark.parametrize(
    ("label", "dtype"), [("float32", DType.F32), ("bfloat16", DType.BF16), ("torch.float16", DType.BF16)]
)
def test_both_spellings_of_dtype(label: str, dtype: DType) -> None:
    assert hf(torch_dtype=label).dtype is dtype
    assert hf(torch_dtype="absent", dtype=label).dtype is dtype


def test_families_differ_in_bias_and_norm() -> None:
    assert (hf(**QWEN2).qkv_bias, hf(**QWEN2).qk_norm) == (True, False)
    assert (hf(**QWEN3, head_dim=16).qkv_bias, hf(**QWEN3).qk_norm) == (False, True)
    assert hf(architectures="absent", model_type="qwen2").family is Family.QWEN2


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
    ],
)
def test_spellings_of_rope_agree(changes: dict[str, Any]) -> None:
    assert hf(**changes).rope == RopeSpec(theta=5e5, kind=RopeKind.LINEAR, factor=2.0, original_max_positions=512)


def test_rope_scaling_null_or_default_is_plain() -> None:
    assert hf(rope_scaling=None).rope == hf(rope_parameters={"rope_type": "default", "rope_theta": 1e4}).rope


def test_yarn_stretches_the_context_and_sliding_windows_cap_it() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert hf(rope_scaling=yarn).context_tokens == 2048
    assert hf(**MISTRAL, sliding_window=128).context_tokens == 128
    assert hf(**MISTRAL, sliding_window=None).sliding_window is None
    assert hf(**MISTRAL).sliding_window == 4096
    assert hf(**MISTRAL).context_tokens == 512
    assert hf(**QWEN2, sliding_window=64, use_sliding_window=False).sliding_window is None
    assert hf(**QWEN2, sliding_window=64, use_sliding_window=True, max_window_layers=5).sliding_window is None
    assert hf(**QWEN2, sliding_window=64, use_sliding_window=True, max_window_layers=4).sliding_window == 64
    kinds = ["full_attention"] * 5
    assert hf(**QWEN3, layer_types=kinds, sliding_window=64, use_sliding_window=True).sliding_window is None
    kinds[2] = "sliding_attention"
    assert hf(**QWEN3, layer_types=kinds, sliding_window=64, use_sliding_window=True).sliding_window == 64
    assert hf(sliding_window=64).sliding_window is None  # Llama has none, whatever the config says


def test_generation_config_overrides_and_suggests() -> None:
    spec = hf(
        {"eos_token_id": [5, 2, 5], "bos_token_id": 3, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0}
    )
    assert (spec.bos_id, spec.eos_ids) == (3, (5, 2))
    assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k, spec.sampling.min_p) == (
        0.6,
        0.95,
        20,
        0,
    )
    assert spec.sampling.repetition_penalty is None
    assert hf({}, eos_token_id=None).eos_ids == ()
    assert hf({"top_k": -1}).sampling.top_k == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["MixtralForCausalLM"]), ("architectures", "LlamaForCausalLM"), ("architectures", []),
        ("hidden_size", "absent"), ("hidden_size", -64), ("hidden_size", 0), ("hidden_size", 1 << 40),
        ("hidden_size", True), ("hidden_size", 64.0), ("hidden_size", "64"), ("num_hidden_layers", 10**30),
        ("num_attention_heads", 0), ("num_key_value_heads", -1), ("vocab_size", 1 << 40),
        ("head_dim", 0), ("head_dim", 7), ("num_attention_heads", 9), ("intermediate_size", None),
        ("max_position_embeddings", 0), ("rms_norm_eps", math.nan), ("rms_norm_eps", math.inf), ("rms_norm_eps", "x"),
        ("rope_theta", math.nan), ("rope_theta", 0), ("rope_theta", -1e4), ("rope_theta", 10**400),
        ("tie_word_embeddings", 1), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
        ("quantization_config", {}), ("torch_dtype", "float8_e4m3fn"), ("eos_token_id", 512), ("eos_token_id", [-1]),
        ("eos_token_id", "2"), ("bos_token_id", 512), ("partial_rotary_factor", 0.5),
    ],
)  # fmt: skip
def test_refusals_name_the_key(key: str, value: Any) -> None:
    # A head count that does not divide shows as the head size that cannot be derived from it.
    named = "head_dim" if (key, value) == ("num_attention_heads", 9) else key.removesuffix("s")
    with pytest.raises(BadModel, match=named):
        hf(**{key: value})


@pytest.mark.parametrize(
    ("scaling", "key"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "rope_type"), ({"type": 3}, "type"),
        ({"rope_type": "linear"}, "factor"), ({"rope_type": "linear", "factor": math.nan}, "factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "high_freq_factor"),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}, "original_max"),
    ],
)  # fmt: skip
def test_refusals_in_rope_name_the_key(scaling: dict[str, Any], key: str) -> None:
    with pytest.raises(BadModel, match=key):
        hf(rope_scaling=scaling)


def test_rope_by_layer_type_is_refused() -> None:
    with pytest.raises(BadModel, match="rope_parameters"):
        hf(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6}})


def test_heads_must_divide() -> None:
    with pytest.raises(BadModel, match="8 attention heads cannot share 3"):
        hf(num_key_value_heads=3)


def test_gguf_in_full() -> None:
    spec = gguf()
    assert (spec.family, spec.n_layers, spec.hidden, spec.heads, spec.kv_heads) == (Family.LLAMA, 30, 576, 9, 3)
    assert (spec.head_dim, spec.ffn, spec.vocab, spec.max_positions) == (64, 1536, 49152, 8192)
    assert spec.tied_embeddings and spec.dtype is DType.BF16 and spec.rope == RopeSpec(theta=100000.0)
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))
    assert not gguf(("output.weight",)).tied_embeddings
    assert gguf(tokenizer__ggml__eot_token_id=7).eos_ids == (2, 7)
    assert gguf(llama__vocab_size="absent", tokenizer__ggml__tokens=["a"] * 10).vocab == 10


def test_gguf_rope_scaling() -> None:
    linear = gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert (linear.rope.kind, linear.rope.factor) == (RopeKind.LINEAR, 4.0)
    assert gguf(llama__rope__scale_linear=2.0).rope.factor == 2.0
    assert gguf(llama__rope__scaling__type="none", llama__rope__scaling__factor=4.0).rope.kind is RopeKind.NONE
    yarn = gguf(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=2048,
    )
    assert (yarn.rope.kind, yarn.rope.original_max_positions) == (RopeKind.YARN, 2048)
    assert yarn.rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("general__architecture", "gemma3", "general.architecture"),
        ("general__architecture", "absent", "general.architecture"),
        ("llama__block_count", 0, "block_count"),
        ("llama__block_count", [30], "block_count"),
        ("llama__attention__head_count_kv", [3, 3], "head_count_kv"),
        ("llama__attention__layer_norm_rms_epsilon", "absent", "layer_norm_rms_epsilon"),
        ("llama__rope__dimension_count", 32, "rope.dimension_count"),
        ("llama__attention__value_length", 32, "attention.value_length"),
        ("llama__expert_count", 8, "expert_count"),
        ("llama__vocab_size", "absent", "vocab_size"),
        ("llama__rope__scaling__type", "longrope", "rope.scaling.type"),
        ("tokenizer__ggml__eos_token_id", 49152, "eos_token_id"),
    ],
)
def test_gguf_refusals_name_the_key(key: str, value: Any, named: str) -> None:
    with pytest.raises(BadModel, match=named):
        gguf(**{key: value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_KEYS = ("rope_type", "factor", "rope_theta", "beta_fast", "low_freq_factor", "original_max_position_embeddings")


@given(
    key=st.sampled_from([*LLAMA, "head_dim", "rope_theta", "rope_scaling", "sliding_window", "layer_types"]),
    value=JSON,
    family=st.sampled_from([{}, QWEN2, QWEN3, MISTRAL]),
)
def test_any_value_gives_a_spec_or_a_refusal(key: str, value: Any, family: dict[str, Any]) -> None:
    try:
        hf(**{**family, key: value})
    except BadModel as refusal:
        assert str(refusal)


@given(
    kind=st.sampled_from(["linear", "dynamic", "llama3", "yarn"]),
    changes=st.dictionaries(st.sampled_from(ROPE_KEYS[1:]), st.floats(0, 1e13) | st.integers(0, 1 << 25), max_size=4),
    head_dim=st.sampled_from([2, 8, 64]),
)
def test_any_accepted_rope_gives_finite_tables(kind: str, changes: dict[str, Any], head_dim: int) -> None:
    base = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    try:
        rope = hf(rope_scaling={**base, **changes}).rope
    except BadModel:
        return
    tables = rotary_tables(rope, head_dim, 1024)
    assert np.isfinite(tables.cos).all() and np.isfinite(tables.sin).all()


def test_plain_tables_are_the_definition() -> None:
    tables = rope_tables(hf(), 16)
    assert tables.cos.shape == tables.sin.shape == (16, 4) and tables.cos.dtype == np.float32
    for position in (0, 1, 15):
        for pair in range(4):
            angle = position * 10000.0 ** (-2 * pair / 8)
            assert tables.cos[position, pair] == pytest.approx(math.cos(angle), abs=1e-6)
            assert tables.sin[position, pair] == pytest.approx(math.sin(angle), abs=1e-6)


def test_freq_factors_divide() -> None:
    plain = RopeSpec(theta=10000.0)
    factored = RopeSpec(theta=10000.0, freq_factors=(1.0, 2.0, 4.0, 8.0))
    assert np.allclose(inv_freq(factored, 8, 1).inv_freq * [1, 2, 4, 8], inv_freq(plain, 8, 1).inv_freq, rtol=1e-6)


def test_layout_places_every_slot_once() -> None:
    placed = layout(hf(), lambda n, k, form: -(-n * form.row_bytes(k) // 64) * 64)
    end = 0
    for slot in placed.entries:
        assert slot.offset % 64 == 0 and 0 <= slot.offset - end < 64
        assert slot.n == sum(part.rows for part in slot.parts)
        end = slot.offset + slot.nbytes
    assert placed.total_bytes == -(-end // 64) * 64
    by_name = {slot.name: slot for slot in placed.entries}
    assert len(by_name) == len(placed.entries) == 1 + 5 * 6 + 1
    assert (by_name["layers.4.qkv"].n, by_name["layers.4.qkv"].k) == (64 + 32 + 32, 64)
    assert (by_name["layers.0.gate_up"].n, by_name["layers.0.down"].k) == (344, 172)
    assert by_name["final_norm"].kind is SlotKind.VECTOR and by_name["final_norm"].nbytes == 256
    assert "head" not in by_name


def test_layout_hash_follows_the_spec() -> None:
    def digest(**changes: Any) -> str:
        return layout_hash(layout(hf(**changes), lambda n, k, form: n * form.row_bytes(k)), "plain")

    changes: list[dict[str, Any]] = [
        {},
        {"vocab_size": 513},
        {"torch_dtype": "bfloat16"},
        QWEN2,
        {"num_hidden_layers": 4},
    ]
    assert digest() == digest(rope_theta=5e5)
    assert len({digest(**change) for change in changes}) == len(changes)


def form_bytes(n: int, k: int, form: Form) -> int:
    return -(-n * form.row_bytes(k) // 64) * 64


def test_parts_of_one_form_share_a_band() -> None:
    forms = {
        "layers.0.qkv": (Form.Q8_0, Form.Q8_0, Form.Q4_1),
        "layers.1.qkv": (Form.Q4_1, Form.BF16, Form.Q4_1),
        "layers.2.gate_up": (Form.Q4_1, Form.Q4_1),
    }
    placed = layout(hf(), form_bytes, forms)
    by_name = {slot.name: slot for slot in placed.entries}
    assert by_name["layers.0.qkv"].bands == (Band(Form.Q8_0, 96), Band(Form.Q4_1, 32))
    assert by_name["layers.0.qkv"].nbytes == form_bytes(96, 64, Form.Q8_0) + form_bytes(32, 64, Form.Q4_1)
    assert [band.rows for band in by_name["layers.1.qkv"].bands] == [64, 32, 32]
    assert by_name["layers.2.gate_up"].bands == (Band(Form.Q4_1, 344),)
    assert by_name["layers.2.qkv"].bands == (Band(Form.F32, 128),) and by_name["final_norm"].bands == ()
    assert form_names(placed) == "float32 + q4_1 + q8_0 + bfloat16"
    assert form_names(layout(hf(torch_dtype="bfloat16"), form_bytes)) == "bfloat16"


def test_layout_hash_covers_every_band() -> None:
    """Also where nothing else tells: the same sizes, the same total, forms of two slots exchanged."""

    def digest(forms: dict[str, tuple[Form, ...]]) -> str:
        return layout_hash(layout(hf(), lambda n, k, form: n * k, forms), "plain")

    one, other = (Form.Q4_1,) * 3, (Form.Q8_0,) * 3
    found = {
        digest({}), digest({"layers.0.qkv": one, "layers.1.qkv": other}), digest({"layers.0.qkv": one}),
        digest({"layers.0.qkv": other, "layers.1.qkv": one}),
        digest({"layers.0.qkv": (Form.Q4_1, Form.Q4_1, Form.Q8_0)}),
    }  # fmt: skip
    assert len(found) == 5
    assert digest({"layers.0.qkv": (Form.F32,) * 3}) == digest({})
