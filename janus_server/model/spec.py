"""What a dense decoder is made of, read from a config.json or from GGUF metadata. Pure: no I/O.

`checkpoint` calls `from_hf` and `from_gguf`; the model, the layout and the cards read the record. Every number is
checked for type and range here, and a refusal names the key. It must never guess at a feature it does not know: an
unknown architecture or switch is refused, because a model that runs wrongly is worse than one that does not run.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from janus_server.errors import BadModel
from janus_server.kernels.table import DType
from janus_server.model.rope import RopeKind, RopeSpec, RopeTables, rotary_tables


class Family(enum.Enum):
    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint's makers suggest for sampling; None where they say nothing. top_k 0 means all."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A dense Llama-shaped decoder: pre-norm RMS, grouped-query attention with rotary halves, SiLU-gated feed-forward.

    max_positions is what the checkpoint declares; dtype is that of its weights (F32, or BF16 for anything shorter).
    sliding_window is the width of local attention in tokens, where any layer has it.
    """

    family: Family
    n_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    rms_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeSpec
    dtype: DType
    sliding_window: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def context_tokens(self) -> int:
        """Positions that can be served exactly.

        YaRN reaches factor times the pretrained length, whatever max_positions says. Local layers equal full
        attention up to their window, and full attention is what the kernels compute: the window caps the context.
        """
        tokens = self.max_positions
        if self.rope.kind is RopeKind.YARN:
            tokens = max(tokens, int(self.rope.factor * self.rope.original_max_positions))
        return tokens if self.sliding_window is None else min(tokens, self.sliding_window)


HF_ARCHITECTURES: Final = (
    ("LlamaForCausalLM", "llama", Family.LLAMA),
    ("MistralForCausalLM", "mistral", Family.LLAMA),
    ("Qwen2ForCausalLM", "qwen2", Family.QWEN2),
    ("Qwen3ForCausalLM", "qwen3", Family.QWEN3),
)
MAX_SIZE: Final = 1 << 20
MAX_VOCAB: Final = 1 << 22
MAX_POSITIONS: Final = 1 << 24


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelSpec:
    """The spec of a Hugging Face folder from its config.json and, where there is one, its generation_config.json."""
    keys = _Keys(config, "config.json")
    name, family = _hf_family(keys)
    _refuse_unknown_switches(keys, family)
    heads = keys.integer("num_attention_heads", 1, 4096)
    hidden = keys.integer("hidden_size", 1, MAX_SIZE)
    # Qwen3 states its head size or means 128; the others divide.
    head_dim = keys.integer("head_dim", 2, 1024, 128 if family is Family.QWEN3 else _divide(keys, hidden, heads))
    max_positions = keys.integer("max_position_embeddings", 1, MAX_POSITIONS)
    vocab = keys.integer("vocab_size", 1, MAX_VOCAB)
    layers = keys.integer("num_hidden_layers", 1, 4096)
    bos_id, eos_ids = _hf_ends(keys, _Keys(generation or {}, "generation_config.json"), vocab)
    spec = ModelSpec(
        family=family,
        n_layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("num_key_value_heads", 1, 4096, heads),
        head_dim=head_dim,
        ffn=keys.integer("intermediate_size", 1, MAX_SIZE),
        vocab=vocab,
        max_positions=max_positions,
        rms_eps=keys.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
        rope=_hf_rope(keys, max_positions),
        dtype=_hf_dtype(keys),
        sliding_window=_hf_window(keys, name, layers),
        bos_id=bos_id,
        eos_ids=eos_ids,
        sampling=_hf_sampling(_Keys(generation or {}, "generation_config.json")),
    )
    return _checked(spec, "config.json")


def from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelSpec:
    """The spec of a GGUF file from its metadata; the embeddings are tied when the file has no `output.weight`."""
    top = _Keys(metadata, "the GGUF metadata")
    arch = top.text("general.architecture")
    family = next((known for known in Family if known.value == arch), None)
    if family is None:
        raise BadModel(f"'general.architecture' is {arch!r:.80}; llama, qwen2 and qwen3 are served.")
    keys = _Keys(metadata, "the GGUF metadata", f"{arch}.")
    if keys.integer("expert_count", 0, 4096, 0) > 0:
        raise BadModel(f"'{arch}.expert_count' makes this a mixture of experts; dense models are served.")
    hidden, heads = keys.integer("embedding_length", 1, MAX_SIZE), keys.integer("attention.head_count", 1, 4096)
    head_dim = keys.integer("attention.key_length", 2, 1024, _divide(keys, hidden, heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, 1, 1024, head_dim) != head_dim:
            raise BadModel(f"'{arch}.{key}' differs from the head size {head_dim}; whole heads are served.")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocab = keys.integer("vocab_size", 1, MAX_VOCAB, len(tokens) if isinstance(tokens, list) else None)
    max_positions = keys.integer("context_length", 1, MAX_POSITIONS)
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    spec = ModelSpec(
        family=family,
        n_layers=keys.integer("block_count", 1, 4096),
        hidden=hidden,
        heads=heads,
        kv_heads=keys.integer("attention.head_count_kv", 1, 4096, heads),
        head_dim=head_dim,
        ffn=keys.integer("feed_forward_length", 1, MAX_SIZE),
        vocab=vocab,
        max_positions=max_positions,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        tied_embeddings="output.weight" not in tensor_names,
        qkv_bias=family is Family.QWEN2,
        qk_norm=family is Family.QWEN3,
        rope=_gguf_rope(keys, max_positions),
        dtype=DType.BF16,
        sliding_window=keys.optional_integer("attention.sliding_window", 0, MAX_POSITIONS) or None,
        bos_id=top.optional_integer("tokenizer.ggml.bos_token_id", 0, vocab - 1),
        eos_ids=_unique(top.optional_integer(key, 0, vocab - 1) for key in ends),
    )
    return _checked(spec, "the GGUF metadata")


def rope_tables(spec: ModelSpec, positions: int) -> RopeTables:
    """cos and sin [positions, head_dim/2] float32 of this model, attention scaling folded in."""
    return rotary_tables(spec.rope, spec.head_dim, positions)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keys:
    """Typed reads from an untrusted mapping. A refusal names the key, what is allowed and where it was read.

    A key that is absent or null takes the default; without one it is refused.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""

    def raw(self, key: str) -> Any:
        return self.values.get(self.prefix + key)

    def bad(self, key: str, wanted: str) -> BadModel:
        value = self.raw(key)
        said = "is missing" if value is None else f"is {str(value)[:60]!r}"
        return BadModel(f"{self.where}: '{self.prefix}{key}' {said}; it must be {wanted}.")

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        value = self.raw(key)
        if value is not None and (type(value) is not int or not low <= value <= high):
            raise self.bad(key, f"a whole number from {low} to {high}")
        return value

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.optional_integer(key, low, high)
        value = default if value is None else value
        if value is None or not low <= value <= high:
            raise self.bad(key, f"a whole number from {low} to {high}")
        return value

    def optional_number(self, key: str, low: float, high: float) -> float | None:
        value = self.raw(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not low <= value <= high or not math.isfinite(value):
            raise self.bad(key, f"a finite number from {low:g} to {high:g}")
        return float(value)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.optional_number(key, low, high)
        value = default if value is None else value
        if value is None:
            raise self.bad(key, f"a finite number from {low:g} to {high:g}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw(key)
        if value is not None and type(value) is not bool:
            raise self.bad(key, "true or false")
        return default if value is None else value

    def text(self, key: str, default: str | None = None) -> str:
        value = self.raw(key)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.bad(key, "a text")
        return value

    def inner(self, key: str) -> _Keys | None:
        value = self.raw(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(key, "an object")
        return None if value is None else _Keys(value, f"{self.where} ({key})")


def _divide(keys: _Keys, hidden: int, heads: int) -> int | None:
    return hidden // heads if hidden % heads == 0 else None


def _unique(ids: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _checked(spec: ModelSpec, where: str) -> ModelSpec:
    """Relations between numbers that are each fine alone."""
    if spec.heads % spec.kv_heads:
        raise BadModel(f"{where}: {spec.heads} attention heads cannot share {spec.kv_heads} key/value heads evenly.")
    if spec.head_dim % 2:
        raise BadModel(f"{where}: 'head_dim' is {spec.head_dim}; rotary positions need an even number.")
    if spec.rms_eps <= 0.0:
        raise BadModel(f"{where}: the epsilon of the RMS norm must be positive.")
    return spec


def _hf_family(keys: _Keys) -> tuple[str, Family]:
    """(model_type, family) by the first of 'architectures', or by 'model_type' where that is absent."""
    names = keys.raw("architectures")
    if names is not None and (not isinstance(names, list) or not names or not isinstance(names[0], str)):
        raise keys.bad("architectures", "a list of names")
    for architecture, kind, family in HF_ARCHITECTURES:
        if (names[0] == architecture) if names else (keys.raw("model_type") == kind):
            return kind, family
    given = names[0] if names else keys.raw("model_type")
    served = ", ".join(architecture for architecture, _, _ in HF_ARCHITECTURES)
    raise BadModel(f"config.json: the architecture {str(given)[:80]!r} is not served; {served} are.")


def _refuse_unknown_switches(keys: _Keys, family: Family) -> None:
    """Switches of these families that would change the arithmetic and are not implemented."""
    if keys.text("hidden_act", "silu") != "silu":
        raise keys.bad("hidden_act", "'silu'")
    for key in ("mlp_bias", "attention_bias"):
        # Qwen2's q, k and v biases are always there and this key means nothing to it.
        if family is not Family.QWEN2 and keys.flag(key, False):
            raise keys.bad(key, "false: a bias on the attention output or the feed-forward is not served")
    if keys.raw("quantization_config") is not None:
        raise keys.bad("quantization_config", "absent: quantised weights are read from GGUF files")
    if keys.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise keys.bad("partial_rotary_factor", "1")


def _hf_rope(keys: _Keys, max_positions: int) -> RopeSpec:
    """Both spellings: `rope_parameters` with theta inside, or `rope_theta` beside `rope_scaling`."""
    inner = keys.inner("rope_parameters") or keys.inner("rope_scaling") or _Keys({}, keys.where)
    if any(isinstance(value, Mapping) for value in inner.values.values()):
        raise keys.bad("rope_parameters", "one set of numbers for all layers")
    theta = inner.number("rope_theta", 2.0, 1e12, keys.number("rope_theta", 2.0, 1e12, 10000.0))
    label = inner.text("rope_type", inner.text("type", "default"))
    if inner.number("partial_rotary_factor", 0.0, 1.0, 1.0) != 1.0:
        raise inner.bad("partial_rotary_factor", "1")
    kind = {"default": RopeKind.NONE}.get(label) or next((k for k in RopeKind if k.value == label), None)
    if kind is None:
        raise inner.bad("rope_type", "one of default, linear, dynamic, llama3, yarn")
    if kind is RopeKind.NONE:
        return RopeSpec(theta=theta)
    original = inner.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    outer = keys.optional_integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    rope = RopeSpec(
        theta=theta,
        kind=kind,
        factor=inner.number("factor", 1.0, 4096.0, max_positions / original if kind is RopeKind.YARN else None),
        original_max_positions=max_positions if kind is RopeKind.DYNAMIC else outer or original,
        low_freq_factor=inner.number("low_freq_factor", 1e-6, 1e6, None if kind is RopeKind.LLAMA3 else 1.0),
        high_freq_factor=inner.number("high_freq_factor", 1e-6, 1e6, None if kind is RopeKind.LLAMA3 else 4.0),
        beta_fast=inner.number("beta_fast", 0.0, 1e6, 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 0.0, 1e6, 1.0) or 1.0,
        attention_factor=inner.optional_number("attention_factor", 0.0, 1e3),
        mscale=inner.optional_number("mscale", 0.0, 1e3),
        mscale_all_dim=inner.optional_number("mscale_all_dim", 0.0, 1e3),
        truncate=inner.flag("truncate", True),
    )
    if kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise inner.bad("high_freq_factor", f"more than 'low_freq_factor' ({rope.low_freq_factor:g})")
    return rope


def _hf_dtype(keys: _Keys) -> DType:
    label = keys.text("dtype", keys.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if label not in ("float32", "bfloat16", "float16"):
        raise keys.bad("dtype" if keys.raw("dtype") is not None else "torch_dtype", "float32, bfloat16 or float16")
    return DType.F32 if label == "float32" else DType.BF16


def _hf_window(keys: _Keys, model_type: str, layers: int) -> int | None:
    """The sliding window, where at least one layer has it. Llama has none whatever its config says."""
    if model_type == "llama":
        return None
    window = keys.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if model_type == "mistral":
        # Absent means the class's own 4096; null means none.
        return 4096 if "sliding_window" not in keys.values else window
    if not keys.flag("use_sliding_window", False):
        window = None
    kinds = keys.raw("layer_types")
    if kinds is None:
        return window if keys.integer("max_window_layers", 0, MAX_SIZE, 28) < layers else None
    if not isinstance(kinds, list) or any(kind not in ("full_attention", "sliding_attention") for kind in kinds):
        raise keys.bad("layer_types", "a list of 'full_attention' and 'sliding_attention'")
    if "sliding_attention" not in kinds:
        return None
    if window is None:
        raise keys.bad("sliding_window", "a whole number, since 'layer_types' has sliding layers")
    return window


def _hf_ends(keys: _Keys, generation: _Keys, vocab: int) -> tuple[int | None, tuple[int, ...]]:
    """(bos id, eos ids); what generation_config.json says comes before config.json."""
    ends: tuple[int, ...] = ()
    for source in (generation, keys):
        value = source.raw("eos_token_id")
        items = value if isinstance(value, list) else [value]
        if any(item is not None and (type(item) is not int or not 0 <= item < vocab) for item in items):
            raise source.bad("eos_token_id", f"ids from 0 to {vocab - 1}")
        ends = ends or _unique(items)
    bos = generation.optional_integer("bos_token_id", 0, vocab - 1)
    return keys.optional_integer("bos_token_id", 0, vocab - 1) if bos is None else bos, ends


def _hf_sampling(generation: _Keys) -> SamplingDefaults:
    top_k = generation.optional_integer("top_k", -1, MAX_VOCAB)
    return SamplingDefaults(
        temperature=generation.optional_number("temperature", 0.0, 100.0),
        top_p=generation.optional_number("top_p", 0.0, 1.0) or None,
        top_k=None if top_k is None else max(top_k, 0),
        min_p=generation.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=generation.optional_number("repetition_penalty", 0.0, 100.0) or None,
    )


def _gguf_rope(keys: _Keys, max_positions: int) -> RopeSpec:
    """GGUF's rope keys. Llama 3's factors are not here: they come as the tensor `rope_freqs.weight`."""
    theta = keys.number("rope.freq_base", 2.0, 1e12, 10000.0)
    label = keys.text("rope.scaling.type", "none")
    linear = keys.number("rope.scale_linear", 0.0, 4096.0, 1.0)  # the key's old name
    factor = keys.number("rope.scaling.factor", 0.0, 4096.0, linear) or 1.0
    if label not in ("none", "linear", "yarn"):
        raise keys.bad("rope.scaling.type", "one of none, linear, yarn")
    if label == "yarn":
        attention = keys.number("rope.scaling.attn_factor", 0.0, 1e3, 1.0)
        attention = keys.number("rope.scaling.yarn_attn_factor", 0.0, 1e3, attention) or 1.0
        return RopeSpec(
            theta=theta,
            kind=RopeKind.YARN,
            factor=max(factor, 1.0),
            original_max_positions=keys.integer(
                "rope.scaling.original_context_length", 1, MAX_POSITIONS, max_positions
            ),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 0.0, 1e6, 32.0) or 32.0,
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 0.0, 1e6, 1.0) or 1.0,
            # This format's factor multiplies YaRN's own attention scaling instead of replacing it.
            attention_factor=attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        )
    if (label == "linear" or keys.raw("rope.scaling.type") is None) and factor != 1.0:
        return RopeSpec(theta=theta, kind=RopeKind.LINEAR, factor=factor)
    return RopeSpec(theta=theta)
