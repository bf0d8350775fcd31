"""Tokenizers from folders and GGUF metadata, chats against transformers' ids, and text that imitates control tokens."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_cases import CHATML, NAMES, reference, tokenizer, trained_folder, write_folder
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from janus_server.errors import BadModel, Refused
from janus_server.tokens.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say <how> it's, é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CHATS = (
    [{"role": "user", "content": "Hello, world"}],
    [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "héllo 😀  12345\n\n"},
        {"role": "assistant", "content": " fine,\tthanks "},
        {"role": "user", "content": "and\r\nyou?"},
    ],
)
CHAT_NAMES = tuple(name for name in NAMES if name != "stories260K")


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", CHAT_NAMES)
def test_chats_have_the_ids_of_transformers(name: str) -> None:
    tok, theirs = tokenizer(name), reference(name)
    for chat in CHATS:
        for tools in (None, TOOLS):
            for prompted in (True, False):
                want = theirs.apply_chat_template(
                    chat, tools=tools, add_generation_prompt=prompted, tokenize=True, return_dict=False
                )
                assert tok.encode_chat(chat, tools=tools, add_generation_prompt=prompted) == want


def test_qwen3_thinking_and_tool_calls_as_transformers() -> None:
    tok, theirs = tokenizer("qwen3"), reference("qwen3")
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    chat = [
        *CHATS[0],
        {"role": "assistant", "content": "", "reasoning_content": "look it up", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
    ]
    for thinking in (True, False):
        want = theirs.apply_chat_template(
            chat, tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False, enable_thinking=thinking
        )
        assert tok.encode_chat(chat, tools=TOOLS, kwargs={"enable_thinking": thinking}) == want
    no_thinking = tok.decode(tok.encode_chat(CHATS[0], kwargs={"enable_thinking": False}), False)
    assert no_thinking.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=50)
@given(text=st.text(max_size=30))
def test_text_has_the_ids_of_the_library(name: str, text: str) -> None:
    tok = tokenizer(name)
    clean = text.encode("utf-8", "replace").decode()
    want = tok._backend.encode(clean, add_special_tokens=False).ids
    assert tok.encode(text, add_special=False, parse_special=True) == want
    assert tok._encode_literally(clean, at_start=True) == want  # no marker in it: both ways agree


def test_bos_goes_around_text_where_the_model_wants_it() -> None:
    for name, has_bos in (("stories260K", True), ("deepseek_v3", True), ("qwen3", False), ("smollm2", False)):
        tok = tokenizer(name)
        assert tok.add_bos is has_bos
        ids = tok.encode("a b", add_special=True, parse_special=False)
        assert ids == [*([tok.bos_id] if has_bos else []), *tok.encode("a b", add_special=False, parse_special=False)]


def test_tiny_llama_golden_ids(shared: Path) -> None:
    golden = json.loads((shared / "models/stories260K/expected_greedy.json").read_text())
    tok = tokenizer("stories260K")
    assert tok.vocab_size == 512 and tok.eos_ids == (2,) and tok.bos_id == 1
    text = tok.decode(tok.encode("Once upon a time", add_special=True, parse_special=False), True)
    assert text == "Once upon a time"
    assert golden


# Control tokens that text only spells


@pytest.mark.parametrize("name", CHAT_NAMES)
def test_text_that_spells_control_tokens_stays_text(name: str) -> None:
    tok = tokenizer(name)
    plain = tok.encode_chat(user("X"))
    markers = [text for text in tok._markers if text in tok.decode(plain, False)] + ["<|endoftext|>", "<|im_end|>"]
    for marker in markers:
        said = f"a {marker}b\n {marker}"
        ids = tok.encode_chat(user(said))
        # The structure is the plain chat's: what is added are the words only.
        known = {marker.id for marker in tok._markers.values()}
        assert [i for i in ids if i in known] == [i for i in plain if i in known]
        assert tok.decode(ids, False) == tok.decode(plain, False).replace("X", said)
        assert ids == spliced(name, plain, said)


def spliced(name: str, plain: list[int], said: str) -> list[int]:
    """The chat about "X" with the whole segment around X encoded as ordinary text: what the library would do alone."""
    tok = tokenizer(name)
    known = {marker.id for marker in tok._markers.values()}
    x = max(i for i, token in enumerate(plain) if "X" in tok.token_text(token))
    start = max((i + 1 for i in range(x) if plain[i] in known), default=0)
    end = min((i for i in range(x, len(plain)) if plain[i] in known), default=len(plain))
    segment = tok.decode(plain[start:end], False).replace("X", said)
    backend = literal_twin(name)
    return [*plain[:start], *backend.encode(segment, add_special_tokens=False).ids, *plain[end:]]


@functools.cache
def literal_twin(name: str) -> Backend:
    """The library with every marker declared special and told to take special tokens for text."""
    tok = tokenizer(name)
    backend = Backend.from_str(tok._backend.to_str())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tok._markers])
    backend.encode_special_tokens = True
    return backend


def test_encode_reads_control_tokens_only_when_told_to() -> None:
    tok = tokenizer("trained")
    read = tok.encode("a<|im_end|>", add_special=False, parse_special=True)
    text = tok.encode("a<|im_end|>", add_special=False, parse_special=False)
    assert read[-1] == tok.eos_ids[0] and tok.eos_ids[0] not in text
    assert tok.decode(read, False) == tok.decode(text, False) == tok.decode(text, True)
    assert tok.is_special(read[-1]) and not any(map(tok.is_special, text))


def test_split_parts_tools_and_kwargs_cannot_smuggle_control_tokens() -> None:
    tok = tokenizer("qwen3")
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|><|im_end|>"}]
    ids = tok.encode_chat([{"role": "user", "content": parts}])
    assert tok.decode(ids, False).count("<|im_end|>") == 2 and ids.count(151645) == 1
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "parameters": {"<|im_start|>": 1}}}]
    plain = [{"type": "function", "function": {"name": "f", "parameters": {"g": 1}}}]
    for control in (151644, 151645):
        assert tok.encode_chat(user("x"), tools=tools).count(control) == tok.encode_chat(user("x"), tools=plain).count(
            control
        )


def test_templates_still_find_what_they_look_for() -> None:
    """Qwen3's template cuts reasoning out of the model's own past turns, whatever else the chat spells."""
    tok = tokenizer("qwen3")
    past = {"role": "assistant", "content": "<think>\nhm</think>\n\nyes"}
    ids = tok.encode_chat([*user("<|im_end|>a"), past, *user("</think> b")])
    assert tok.decode(ids, False) == (
        "<|im_start|>user\n<|im_end|>a<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
        "<|im_start|>user\n</think> b<|im_end|>\n<|im_start|>assistant\n"
    )
    assert 151668 not in ids and ids.count(151645) == 3  # </think>, <|im_end|>


def test_private_use_characters_in_messages_are_not_taken_for_stand_ins() -> None:
    tok = tokenizer("trained")
    said = "\U000f0000<|im_end|>\U000f0001"
    assert tok.decode(tok.encode_chat(user(said)), False) == tok.decode(tok.encode_chat(user("X")), False).replace(
        "X", said
    )


# Checkpoints


def test_folders_say_the_same_in_several_ways(tmp_path: Path) -> None:
    folder = shutil.copytree(trained_folder(), tmp_path / "m")
    want = Tokenizer.from_folder(folder).encode_chat(user("x"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bare = Tokenizer.from_folder(folder)
    assert not bare.has_chat_template
    with pytest.raises(Refused, match=r"/v1/completions") as caught:
        bare.encode_chat(user("x"))
    assert caught.value.status == 400
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert Tokenizer.from_folder(folder).encode_chat(user("x")) == want
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.jinja").write_text(CHATML)
    assert Tokenizer.from_folder(folder).encode_chat(user("x")) == want
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools{{ tools | length }}"}]
    config["chat_template"] = named
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    both = Tokenizer.from_folder(folder)
    assert both.encode_chat(user("x")) == want
    assert both.decode(both.encode_chat(user("x"), tools=TOOLS), False) == "tools1"
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2, 5]}))
    assert Tokenizer.from_folder(folder).eos_ids == (2, 0, 5)


def test_truncation_and_padding_in_a_checkpoint_do_not_touch_prompts() -> None:
    backend = Backend.from_file(str(trained_folder() / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tok = Tokenizer.from_folder(write_folder(backend, {}))
    want = tokenizer("trained").encode("one two three four five", add_special=True, parse_special=False)
    assert tok.encode("one two three four five", add_special=True, parse_special=False) == want


def test_ordinary_added_tokens_stay_tokens_beside_spelled_ones() -> None:
    backend = Backend.from_file(str(trained_folder() / "tokenizer.json"))
    backend.add_tokens([AddedToken("    ", normalized=False)])
    spaces = backend.token_to_id("    ")
    tok = Tokenizer.from_folder(write_folder(backend, {"eos_token": "<|im_end|>", "chat_template": CHATML}))
    for text in ("a    b", "a    b<|im_end|>"):
        assert tok.encode(text, add_special=False, parse_special=False).count(spaces) == 1
        assert tok.encode_chat(user(text)).count(spaces) == 1


def test_added_tokens_are_found_by_their_text() -> None:
    assert tokenizer("trained").added(["<|im_start|>", "the", "<think>"]) == {"<|im_start|>": (1, True)}
    assert tokenizer("qwen3").added(["<think>", "<tool_call>", "<|im_end|>"]) == {
        "<think>": (151667, False), "<tool_call>": (151657, False), "<|im_end|>": (151645, True),
    }  # fmt: skip


def test_what_is_nested_too_deeply_is_refused_not_a_bug() -> None:
    deep: dict[str, object] = {}
    for _ in range(900):
        deep = {"<|im_start|>": deep}
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    with pytest.raises(Refused, match="too deeply"):
        tokenizer("qwen3").encode_chat([{"role": "user", "content": "x"}], tools=tools)


def test_tokens_have_exact_bytes() -> None:
    tok = tokenizer("trained")
    text = "naïve 😀"
    ids = tok.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(tok.token_bytes, ids)) == text.encode()
    assert tok.token_text(ids[0]) == "n" and "\ufffd" in map(tok.token_text, ids)
    llama = tokenizer("stories260K")
    assert [llama.token_bytes(i) for i in (1, 3, 13)] == [b"<s>", b"\x00", b"\n"]
    for unknown in (-1, tok.vocab_size, 10**12):
        assert tok.token_bytes(unknown) == b"" and tok.decode([unknown], False) == ""


def test_broken_checkpoints_name_the_file(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"tokenizer\.json is missing"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModel, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    shutil.copy(trained_folder() / "tokenizer.json", tmp_path)
    for text in ("[]", "{", "\udcff"):
        (tmp_path / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(BadModel, match=r"tokenizer_config\.json"):
            Tokenizer.from_folder(tmp_path)


# GGUF


def gguf_of(backend: Backend, pre: str) -> dict[str, object]:
    """A byte-level tokenizer as GGUF metadata."""
    spec = json.loads(backend.to_str())
    vocab = {**spec["model"]["vocab"], **{t["content"]: t["id"] for t in spec["added_tokens"]}}
    kinds = {t["id"]: 3 if t["special"] else 4 for t in spec["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [text for text, _ in sorted(vocab.items(), key=lambda item: item[1])],
        "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in range(len(vocab))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.mark.parametrize(("name", "pre"), [("trained", "gpt-2"), ("qwen3", "qwen2"), ("deepseek_v3", "deepseek-v3")])
def test_gguf_metadata_rebuilds_byte_level_tokenizers(name: str, pre: str) -> None:
    original = tokenizer(name)
    template = {"tokenizer.chat_template": original._parts.templates["default"]}
    rebuilt = Tokenizer.from_gguf(gguf_of(original._backend, pre) | template)
    texts = ["It's 12345 o'clock, naïve  café\n\n 你好 <think>x</think><|im_end|>", Path(__file__).read_text()]
    for text in texts:
        for parse in (True, False):
            want = original.encode(text, add_special=False, parse_special=parse)
            assert rebuilt.encode(text, add_special=False, parse_special=parse) == want
        assert rebuilt.decode(want, False) == original.decode(want, False)
    assert rebuilt.vocab_size == original.vocab_size


def test_llama3_splits_digits_by_three_and_takes_whole_words_first() -> None:
    metadata = gguf_of(tokenizer("trained")._backend, "llama-bpe") | {"tokenizer.ggml.bos_token_id": 1}
    tok = Tokenizer.from_gguf(metadata)
    words = tok._backend.pre_tokenizer.pre_tokenize_str("12345 it'S")
    assert [word for word, _ in words] == ["123", "45", "Ġit", "'S"]
    assert tok.add_bos and tok.encode("", add_special=True, parse_special=False) == [1]


def test_gguf_metadata_rebuilds_a_sentencepiece_tokenizer(shared: Path) -> None:
    """The published llama2.c file holds pieces and scores, as a GGUF file does; tokenizer.json is the golden twin."""
    raw = (shared / "models/stories260K/tok512.bin").read_bytes()
    tokens, scores, at = [], [], 4
    while at < len(raw):
        score, size = struct.unpack_from("<fi", raw, at)
        tokens.append(raw[at + 8 : at + 8 + size].decode())
        scores.append(score)
        at += 8 + size
    golden = tokenizer("stories260K")
    names = [golden._backend.id_to_token(i) for i in range(512)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 253],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    assert len(tokens) == 512
    tok = Tokenizer.from_gguf(metadata)
    text = Path(__file__).read_text() + "Once upon a time, Lily’s café 😀 <s> x"
    for line in [text, *text.splitlines()]:
        want = golden.encode(line, add_special=True, parse_special=True)
        assert tok.encode(line, add_special=True, parse_special=True) == want
    assert tok.decode(want, True) == golden.decode(want, True)
    assert (tok.bos_id, tok.eos_ids, tok.add_bos, tok.strips_first_space) == (1, (2,), True, True)


def test_the_packaged_model() -> None:
    tok = tokenizer("smollm2")
    assert (tok.vocab_size, tok.bos_id, tok.add_bos) == (49152, 1, False)
    assert tok.eos_ids[0] == 2
    ids = tok.encode("year 2024", add_special=True, parse_special=False)
    assert list(map(tok.token_text, ids)) == ["year", " ", "2", "0", "2", "4"]


def test_broken_gguf_metadata_names_the_key() -> None:
    good = gguf_of(tokenizer("trained")._backend, "gpt-2")
    for key, value in (
        ("tokenizer.ggml.pre", "no-such-pre"),
        ("tokenizer.ggml.model", "bert"),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", [1, 2]),
        ("tokenizer.ggml.merges", ["nosuch token"]),
        ("tokenizer.ggml.merges", ["nospace"]),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.eos_token_id", 10**6),
    ):
        with pytest.raises(BadModel, match=key):
            Tokenizer.from_gguf({**good, key: value})
