"""Logits and greedy ids against transformers on tiny random checkpoints: every family, tie, shard and RoPE kind."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from local_engine import LocalEngine, request
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from janus_server.kernels.choose import choose
from janus_server.kernels.table import DType, Kernels

MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
ROPES = {
    "none": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
CONTEXT = 256
# Two logits closer than this may swap between two correct f32 implementations.
NEAR_TIE = 1e-4


def make_checkpoint(
    folder: Path, family: str, *, tied: bool = False, sharded: bool = False, rope: str = "none",
    dtype: torch.dtype = torch.float32,
):  # fmt: skip
    """A tiny random checkpoint on disk, and transformers' own model over it in float32."""
    config_type, model_type = MODELS[family]
    torch.manual_seed(zlib.crc32(f"{family} {tied} {rope}".encode()))
    config = config_type(
        vocab_size=300, hidden_size=64, intermediate_size=172, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=tied,
        rope_parameters=ROPES[rope], initializer_range=0.3, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        **({"sliding_window": None} if family == "mistral" else {}),
    )  # fmt: skip
    model = model_type(config).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            parameter.data = (torch.rand_like(parameter.float()) + 0.5).to(dtype)
    model.save_pretrained(folder, max_shard_size="100KB" if sharded else "5GB")
    return model.to(torch.float32).eval()


@pytest.fixture(scope="module", params=["cpu", "torch_ref"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "janus"
    table, reasons = choose("auto" if request.param == "cpu" else "torch_ref", 1, cache)
    if table.name != request.param:
        pytest.skip(f"the native table does not run here: {reasons}")
    return table


def hf_logits(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    """1e-4 relative, to the spread of the logits."""
    scale = np.abs(theirs).max()
    assert np.abs(ours - theirs).max() / scale < 1e-4


def prompt_of(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 300, count)]


CASES = [(f, tied, sharded, "none") for f in MODELS for tied, sharded in ((False, True), (True, False))]
CASES += [("llama", False, False, rope) for rope in ROPES] + [("qwen3", True, True, "yarn")]


@pytest.mark.parametrize(("family", "tied", "sharded", "rope"), CASES)
def test_prefill_and_step_logits_match_transformers(
    tmp_path: Path, kernels: Kernels, family: str, tied: bool, sharded: bool, rope: str
) -> None:
    model = make_checkpoint(tmp_path, family, tied=tied, sharded=sharded, rope=rope)
    if sharded:
        assert (tmp_path / "model.safetensors.index.json").exists()
    engine = LocalEngine(tmp_path, kernels, page_bytes=1 << 13, context_tokens=CONTEXT)
    tokens = prompt_of(90)
    theirs = hf_logits(model, tokens)
    assert_close(engine.logits_of(tokens, [len(tokens)])[0], theirs[-1])
    assert_close(engine.logits_of(tokens, [30] + [1] * 60), theirs[29:])
    assert_close(engine.logits_of(tokens, [7, 1, 23, 31, 28]), theirs[[6, 7, 30, 61, 89]])


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """transformers' greedy continuation and, for each step, how far the second logit lay behind."""
    tokens, gaps = list(prompt), []
    for _ in range(count):
        logits = hf_logits(model, tokens)[-1]
        top = np.sort(logits)[-2:]
        gaps.append(float(top[1] - top[0]) / float(np.abs(logits).max()))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :], gaps


def assert_greedy(ours: list[int], theirs: list[int], gaps: list[float]) -> None:
    """Equal ids; where they differ the two best were a near-tie (the caller forces theirs from there on)."""
    for mine, other, gap in zip(ours, theirs, gaps, strict=True):
        assert mine == other or gap < NEAR_TIE


@pytest.mark.parametrize("family", list(MODELS))
def test_64_greedy_tokens_through_every_path(tmp_path: Path, kernels: Kernels, family: str) -> None:
    model = make_checkpoint(tmp_path, family)
    engine = LocalEngine(tmp_path, kernels, page_bytes=1 << 13, context_tokens=CONTEXT)
    prompt = prompt_of(50, seed=5)
    theirs, gaps = greedy(model, prompt, 64)
    forced = {"a": theirs, "b": theirs}

    def run(**fields: object) -> list[int]:
        engine.generate(request("a", prompt, 64), forced=forced, **fields)
        return [int(row.argmax()) for row in engine.rows[("a", 0)]]

    plain = run()
    assert_greedy(plain, theirs, gaps)
    first = [row.copy() for row in engine.rows[("a", 0)]]
    # Odd chunks
    engine.reset(step_tokens=7)
    run()
    assert all(np.array_equal(a, b) for a, b in zip(first, engine.rows[("a", 0)], strict=True))
    # Prefix hits: whole pages and a partial one
    engine.reset(prefix_caching=True)
    run()
    run()
    assert engine.batcher.stats().prefix_hit_tokens >= 32
    assert all(np.array_equal(a, b) for a, b in zip(first, engine.rows[("a", 0)], strict=True))
    # Preemption: a second request and memory for about one and a half
    pages = 114 // engine.kv.page_tokens + 1
    engine.reset()
    hold = engine.kv.take(engine.xtensor.pool.free_pages - (pages * 3) // 2)
    engine.generate(request("a", prompt, 64), request("b", prompt, 64), forced=forced)
    assert engine.batcher.stats().preemptions > 0
    for name in ("a", "b"):
        assert all(np.array_equal(x, y) for x, y in zip(first, engine.rows[(name, 0)], strict=True))
    for page in hold or ():
        engine.kv.drop(page)


def test_bf16_checkpoint_stays_near_float32(tmp_path: Path, kernels: Kernels) -> None:
    model = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    engine = LocalEngine(tmp_path, kernels, page_bytes=1 << 13, context_tokens=CONTEXT)
    assert engine.spec.dtype is DType.BF16
    tokens = prompt_of(60)
    theirs = hf_logits(model, tokens)[-1]
    ours = engine.logits_of(tokens, [60])[0]
    assert np.abs(ours - theirs).max() / np.abs(theirs).max() < 0.05


def test_stories260k_reproduces_the_golden_text(kernels: Kernels) -> None:
    folder = Path(__file__).parents[2].parent / "shared" / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip("the shared model folder is not here")
    golden = json.loads((folder / "expected_greedy.json").read_text())
    engine = LocalEngine(folder, kernels, context_tokens=512)
    prompt, expected = golden["prompt_ids"], golden["greedy_ids"]
    ours = engine.generate(request("a", prompt, len(expected)))[("a", 0)]
    assert ours == expected
