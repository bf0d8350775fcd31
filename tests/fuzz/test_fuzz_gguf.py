"""GGUF files that lie, by bytes and by structure: `BadModel`, or the weights and the tokenizer that the file holds."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import (
    ARRAY,
    BOOL,
    BYTE_LEVEL,
    CODES,
    F32,
    F64,
    METADATA,
    STRING,
    TENSORS,
    gguf_bytes,
    gguf_tensors,
    values,
)
from harness import EXTREMES, fuzz, scribble
from loading import Loaded, check_weights, outcome, tokenizer_outcome

from janus_server.errors import BadModel
from janus_server.tokens.tokenizer import Tokenizer

Entry = tuple[str, int, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    raw: bytes
    untouched: bool = False


LINES, DATA = gguf_tensors({})
MIXED = gguf_tensors({"blk.0.ffn_down.weight": 8, "blk.0.attn_q.weight": 1, "token_embd.weight": 8})
TEXTS: tuple[Any, ...] = (
    "",
    "llama",
    "gpt2",
    "qwen2",
    "\u2028",
    "a" * 3000,
    b"\xff\xfe",
    "<s>",
    "▁",
    "\x00",
    "default",
)


def make(rng: random.Random) -> Case:
    metadata: list[Entry] = list(rng.choice((METADATA, METADATA, BYTE_LEVEL)))
    lines, data = rng.choice(((LINES, DATA), MIXED))
    kind = rng.random()
    if kind < 0.02:
        return Case(gguf_bytes(metadata, lines, data)[0], True)
    if kind < 0.35:
        raw, span = gguf_bytes(metadata, lines, data)
        return Case(scribble(rng, raw, span if rng.random() < 0.8 else None))
    lines = list(lines)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if rng.random() < 0.7:
            _change_metadata(rng, metadata)
        else:
            _change_line(rng, lines)
    data = rng.choice((data, data, data, data[: rng.randrange(len(data))], data + bytes(64)))
    return Case(gguf_bytes(metadata, lines, data, rng.choice((3, 3, 3, 3, 2, 1, 4, 0x03000000)))[0])


def _change_metadata(rng: random.Random, metadata: list[Entry]) -> None:
    at = rng.randrange(len(metadata))
    key, kind, value = metadata[at]
    match rng.randrange(5):
        case 0:
            del metadata[at]
        case 1:
            metadata.append((rng.choice((key, "", "general.alignment", "split.count", "llama.expert_count", "k" * 300,
                                         "tokenizer.ggml.add_bos_token", "llama.rope.scaling.type",
                                         "tokenizer.ggml.add_space_prefix")), *_value(rng)))  # fmt: skip
        case 2:
            metadata[at] = (key, *_value(rng))
        case 3 if kind == ARRAY:
            metadata[at] = (key, ARRAY, (value[0], _changed_items(rng, value[0], list(value[1]))))
        case _:
            if kind in CODES:
                metadata[at] = (key, kind, _number(rng, kind))
            else:
                metadata[at] = (key, *_value(rng))


def _changed_items(rng: random.Random, kind: int, items: list[Any]) -> list[Any]:
    match rng.randrange(5):
        case 0:
            return items[: rng.randrange(len(items) + 1)]
        case 1:
            return items + items[: rng.randrange(len(items) + 1)]
        case 2:
            rng.shuffle(items)
            return items
        case _:
            for _ in range(rng.randrange(1, 5)):
                if items:
                    items[rng.randrange(len(items))] = rng.choice(TEXTS) if kind == STRING else _number(rng, kind)
            return items


def _value(rng: random.Random) -> tuple[int, Any]:
    """A metadata value of any type."""
    kind = rng.choice((*CODES, STRING, ARRAY))
    if kind == STRING:
        return kind, rng.choice(TEXTS)
    if kind != ARRAY:
        return kind, _number(rng, kind)
    item = rng.choice((*CODES, STRING))
    count = rng.choice((0, 1, 3, 40))
    return kind, (item, [rng.choice(TEXTS) if item == STRING else _number(rng, item) for _ in range(count)])


def _number(rng: random.Random, kind: int) -> Any:
    if kind in (F32, F64):
        return rng.choice((0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"), 0.5, 10000.0))
    if kind == BOOL:
        return rng.random() < 0.5
    bits = {"b": 7, "B": 8, "h": 15, "H": 16, "i": 31, "I": 32, "q": 63, "Q": 64}[CODES[kind]]
    value = rng.choice(EXTREMES) & ((1 << bits) - 1)
    return -value if CODES[kind].islower() and rng.random() < 0.3 else value


def _change_line(rng: random.Random, lines: list[Any]) -> None:
    at = rng.randrange(len(lines))
    name, dims, kind, offset = lines[at]
    match rng.randrange(7):
        case 0:
            del lines[at]
        case 1:
            lines.append(lines[at])
        case 2:
            lines[at] = (rng.choice((*(known for _, known, _ in TENSORS), "", "x", "rope_freqs.weight")), dims, kind,
                         offset)  # fmt: skip
        case 3:
            lines[at] = (name, rng.choice((dims[::-1], (*dims, 1), (), (1,) * 5, dims[:1])), kind, offset)
        case 4:
            lines[at] = (name, tuple(rng.choice((*EXTREMES, dim)) for dim in dims), kind, offset)
        case 5:
            lines[at] = (name, dims, rng.choice((0, 1, 2, 3, 8, 10, 12, 14, 30, 77, (1 << 32) - 1)), offset)
        case _:
            lines[at] = (name, dims, kind, rng.choice((*EXTREMES, offset + 32, offset - 32 & 0xFFFF)))


def test_files_that_lie_are_refused_or_hold_what_was_loaded(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"

    def check(case: Case) -> None:
        path.write_bytes(case.raw)
        found = outcome(path)
        if isinstance(found, Loaded):
            check_weights(found)
            made = tokenizer_outcome(found.checkpoint.metadata)
            assert not case.untouched or isinstance(made, Tokenizer)
        assert not case.untouched or isinstance(found, Loaded)

    fuzz("gguf", 800, make, check)


def make_metadata(rng: random.Random) -> dict[str, Any]:
    """Metadata of either kind of vocabulary with a few lies in it, as the header reader hands it on."""
    metadata: list[Entry] = [e for e in rng.choice((METADATA, BYTE_LEVEL)) if e[0].startswith("tokenizer.")]
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_metadata(rng, metadata)
    if rng.random() < 0.02:
        _change_item(metadata, "tokenizer.ggml.tokens", 20, rng.choice("ab") * 300_000)
    plain = {}
    for key, kind, value in metadata:
        plain[key] = _text(value) if kind != ARRAY else [_text(item) for item in value[1]]
    return plain


def _change_item(metadata: list[Entry], key: str, at: int, item: Any) -> None:
    for place, (name, kind, value) in enumerate(metadata):
        if name == key and kind == ARRAY and len(value[1]) > at:
            metadata[place] = (name, kind, (value[0], [*value[1][:at], item, *value[1][at + 1 :]]))


def _text(value: Any) -> Any:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def test_vocabularies_that_lie_are_refused_or_become_a_tokenizer() -> None:
    fuzz("gguf vocabulary", 3000, make_metadata, tokenizer_outcome)


def test_the_honest_file_loads_and_a_lie_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    raw, _ = gguf_bytes(METADATA, LINES, DATA)
    path.write_bytes(raw)
    loaded = outcome(path)
    assert isinstance(loaded, Loaded)
    _, name, shape = TENSORS[0]
    assert (loaded.weights.embed.handle == values(name, shape)).all()
    assert isinstance(tokenizer_outcome(loaded.checkpoint.metadata), Tokenizer)
    loaded.weights.final_norm[3] += 1.0
    with pytest.raises(AssertionError):
        check_weights(loaded)
    path.write_bytes(raw[:-100])
    assert isinstance(outcome(path), BadModel)
