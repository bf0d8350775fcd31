"""Where a tokenizer comes from: a Hugging Face folder or the metadata of a GGUF file.

`tokens.Tokenizer` calls the two readers below when a model is loaded and keeps what they return. A checkpoint that
cannot be read is `BadModel`, naming the file or key. Never runs code from a checkpoint, never looks outside the
folder.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from janus_server.errors import BadModel

_MAX_CONFIG_BYTES = 8 * 1024 * 1024
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Tokens by which families end a turn: a checkpoint often names only one of its ends.
_TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<｜end▁of▁sentence｜>"
)  # fmt: skip
_GGUF_NAMES = (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
# Longer pieces are no words: to try every cut of one would cost the square of its length.
_LONGEST_PIECE_CHARS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A tokenizer as read.

    templates: chat templates by name ("default", perhaps "tool_use"). token_texts: what templates call bos_token and
    so on.
    prefix, suffix: ids put around a text that asks for special tokens.
    """

    backend: Tokenizer
    templates: Mapping[str, str]
    token_texts: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def parts_from_folder(folder: Path) -> TokenizerParts:
    """Read tokenizer.json and, where present, the configuration files beside it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise BadModel("tokenizer.json is missing: only checkpoints with a `tokenizers` file can be served")
    backend = _built("tokenizer.json cannot be read", lambda: Tokenizer.from_file(str(path)))
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(folder / "tokenizer_config.json")
    named = {**_read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    texts = {name: text for name in _TOKEN_NAMES if (text := _token_text(named.get(name))) is not None}
    eos = [backend.token_to_id(texts["eos_token"])] if "eos_token" in texts else []
    for name in ("generation_config.json", "config.json"):
        eos += _ids(_read_json(folder / name).get("eos_token_id"))
    bos_id = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    prefix, suffix = _surroundings(backend)
    if bos_id is not None:
        prefix = _decided(config.get("add_bos_token"), (bos_id,), prefix)
    if eos and eos[0] is not None:
        suffix = _decided(config.get("add_eos_token"), (eos[0],), suffix)
    return TokenizerParts(
        backend, _folder_templates(folder, config), texts, bos_id, _with_turn_ends(backend, eos), prefix, suffix
    )


def parts_from_gguf(metadata: Mapping[str, object]) -> TokenizerParts:
    """Rebuild the tokenizer that the keys tokenizer.* describe."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    if not tokens:
        raise BadModel("tokenizer.ggml.tokens is empty")
    types = _numbers(metadata, "tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise BadModel("tokenizer.ggml.token_type and tokenizer.ggml.tokens differ in length")
    if model == "gpt2":
        backend, adds_bos = _byte_level(tokens, metadata)
    elif model == "llama":
        backend, adds_bos = _sentencepiece(tokens, types, metadata), True
    else:
        raise BadModel(f"tokenizer.ggml.model {model!r:.80} is not supported (gpt2 and llama are)")
    for kind in (_CONTROL, _USER_DEFINED):
        added = [text for text, its in zip(tokens, types, strict=True) if its == kind]
        backend.add_tokens([AddedToken(text, special=kind == _CONTROL, normalized=False) for text in added])
    ids = {name: _optional_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for name, key in _GGUF_NAMES}
    eos = [ids["eos_token"]]
    eos += [_optional_id(metadata, f"tokenizer.ggml.{key}_token_id", len(tokens)) for key in ("eot", "eom")]
    bos_id = ids["bos_token"]
    adds_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    adds_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    return TokenizerParts(
        backend=backend,
        templates=_gguf_templates(metadata),
        token_texts={name: tokens[token] for name, token in ids.items() if token is not None},
        bos_id=bos_id,
        eos_ids=_with_turn_ends(backend, eos),
        prefix=(bos_id,) if adds_bos and bos_id is not None else (),
        suffix=(eos[0],) if adds_eos and eos[0] is not None else (),
    )


def _built(complaint: str, build: Callable[[], Tokenizer]) -> Tokenizer:
    try:
        return build()
    except Exception as error:  # noqa: BLE001  (the library raises bare Exception for whatever it cannot read)
        raise BadModel(f"{complaint}: {str(error)[:200]}") from None


# Folder


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise BadModel(f"{path.name} is not JSON") from None
    if not isinstance(value, dict):
        raise BadModel(f"{path.name} must hold a JSON object")
    return value


def _read_text(path: Path) -> str | None:
    if not path.is_file():
        return None
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise BadModel(f"{path.name} is larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadModel(f"{path.name} is not UTF-8 text") from None


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own win over the entry in tokenizer_config.json."""
    text = _read_text(folder / "chat_template.jinja")
    if text is not None:
        return {"default": text}
    given = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list):
        given = {item.get("name"): item.get("template") for item in given if isinstance(item, dict)}
    if isinstance(given, dict):
        return {name: text for name, text in given.items() if isinstance(name, str) and isinstance(text, str)}
    return {}


def _token_text(value: object) -> str | None:
    """Tokens are configured as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _surroundings(backend: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's own post-processor puts before and after a text."""
    if backend.post_processor is None:
        return (), ()
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _decided(wanted: object, ids: tuple[int, ...], found: tuple[int, ...]) -> tuple[int, ...]:
    """The configuration's word, where it says one, over what the post-processor does."""
    if wanted is True:
        return found if set(ids) <= set(found) else ids
    return () if wanted is False and found == ids else found


def _with_turn_ends(backend: Tokenizer, ids: Iterable[int | None]) -> tuple[int, ...]:
    special = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
    ends = [special[text] for text in _TURN_ENDS if text in special]
    return tuple(dict.fromkeys([i for i in ids if i is not None] + ends))


# GGUF


def _byte_level(tokens: Sequence[str], metadata: Mapping[str, object]) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    splits = _splits(pre)
    merges = [
        (left, right) for left, _, right in (m.partition(" ") for m in _strings(metadata, "tokenizer.ggml.merges"))
    ]
    llama3 = pre in _LLAMA3
    vocab = {text: i for i, text in enumerate(tokens)}
    backend = _built(
        "tokenizer.ggml.merges do not fit tokenizer.ggml.tokens",
        lambda: Tokenizer(models.BPE(vocab, merges, ignore_merges=llama3)),
    )
    if pre in _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _sentencepiece(tokens: Sequence[str], types: Sequence[float], metadata: Mapping[str, object]) -> Tokenizer:
    scores = _numbers(metadata, "tokenizer.ggml.scores", None)
    if len(scores) != len(tokens):
        raise BadModel("tokenizer.ggml.scores and tokenizer.ggml.tokens differ in length")
    vocab = {text: i for i, text in enumerate(tokens)}
    unknown = _optional_id(metadata, "tokenizer.ggml.unknown_token_id", len(tokens))
    merges = _merges_by_score(tokens, types, scores)
    unk_token = tokens[0 if unknown is None else unknown]
    backend = _built(
        "tokenizer.ggml.tokens do not make a vocabulary",
        lambda: Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True)),
    )
    replaced = normalizers.Replace(" ", "▁")
    strip: list[decoders.Decoder] = []
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
        strip = [decoders.Strip(" ", 1, 0)]
    else:
        backend.normalizer = replaced
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_by_score(tokens: Sequence[str], types: Sequence[float], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose joined piece scores best; as BPE, each split of a piece is a merge."""
    pieces = {
        text
        for text, kind in zip(tokens, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED) and len(text) <= _LONGEST_PIECE_CHARS
    }
    ranked = sorted((-scores[i], i) for i, text in enumerate(tokens) if text in pieces and len(text) > 1)
    return [
        (text[:cut], text[cut:])
        for _, i in ranked
        for text in (tokens[i],)
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = frozenset(("default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "gigachat"))
_SMOLLM = frozenset(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"))
_QWEN2 = frozenset(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"))
_LLAMA3 = frozenset(("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "dbrx", "falcon3"))
_DEEPSEEK3 = frozenset(("deepseek-v3",))


def _splits(pre: object) -> list[pre_tokenizers.PreTokenizer]:
    """The pre-tokenizer behind a name in tokenizer.ggml.pre: GGUF files carry the name, not the patterns."""
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if not isinstance(pre, str):
        raise BadModel("tokenizer.ggml.pre must be a string")
    if pre in _GPT2:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if pre in _SMOLLM:
        return [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=True)]
    if pre in _QWEN2:
        return [_split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST), as_bytes]
    if pre in _LLAMA3:
        return [_split(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST), as_bytes]
    if pre in _DEEPSEEK3:
        words = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rest = r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        return [_split(r"\p{N}{1,3}"), _split("[一-龥぀-ゟ゠-ヿ]+"), _split(words + rest), as_bytes]
    raise BadModel(f"tokenizer.ggml.pre {pre!r:.80} is not supported: its way to split words is not known here")


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _gguf_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {"default": metadata.get(key), "tool_use": metadata.get(f"{key}.tool_use")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _sequence(metadata: Mapping[str, object], key: str, default: Sequence[Any] | None) -> Sequence[Any]:
    value = metadata.get(key, default)
    if value is None or isinstance(value, str) or not hasattr(value, "__len__"):
        raise BadModel(f"{key} is missing or not an array")
    return value  # type: ignore[return-value]


def _numbers(metadata: Mapping[str, object], key: str, default: Sequence[int] | None) -> Sequence[float]:
    values = _sequence(metadata, key, default)
    # NaN, which no order holds, is not equal to itself.
    if not all(type(value) in (int, float) and value == value for value in values):
        raise BadModel(f"{key} must be an array of numbers")
    return values


def _strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    values = _sequence(metadata, key, None)
    if not all(isinstance(value, str) for value in values):
        raise BadModel(f"{key} must be an array of strings")
    return values


def _optional_id(metadata: Mapping[str, object], key: str, vocab: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab:
        raise BadModel(f"{key} is not the id of a token")
    return value
