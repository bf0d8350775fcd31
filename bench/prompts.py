"""Prompts that were written by somebody: ShareGPT-style JSON and JSONL files, to `Written` prompts with answer lengths.

`datasets` gives them times and applications. A text is measured where a tokenizer was given; without one the length of
a recorded answer is estimated, and `exact` is false.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from janus_server.errors import BadConfig

from .records import Endpoint, Written
from .traces import open_text
from .wording import Tokenizer

# What people prune from ShareGPT, so that figures compare: too short to measure, too long for the usual contexts.
SHAREGPT_MIN_TOKENS: Final = 4
SHAREGPT_MAX_PROMPT_TOKENS: Final = 1024
SHAREGPT_MAX_TOKENS: Final = 2048
# Rough bytes of English text a token, used only without a tokenizer.
_BYTES_A_TOKEN: Final = 4
_TEXT_KEYS: Final = ("prompt", "messages", "question", "turns", "text", "instruction")
_LENGTH_KEYS: Final = ("output_tokens", "output_len", "max_tokens", "max_completion_tokens")


class Sample(NamedTuple):
    """One prompt of a file; app is the application that the file names for it, if any."""

    prompt: Written
    output_tokens: int
    app: str = ""


def read_sharegpt(
    path: Path, endpoint: Endpoint, tokenizer: Tokenizer | None, output_tokens: int | None
) -> list[Sample]:
    """The first turn of each conversation; the answer gets the recorded one's length, or output_tokens."""
    with open_text(path) as file:
        try:
            entries = json.load(file)
        except ValueError as error:
            raise BadConfig(f"{path}: it is no JSON ({error})") from None
    if not isinstance(entries, list):
        raise BadConfig(f"{path}: it is not a list of conversations")
    found = []
    for entry in entries:
        turns = entry.get("conversations") or entry.get("conversation") if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(t, dict) for t in turns[:2]):
            continue
        asked, answered = (str(turn.get("value", "")) for turn in turns[:2])
        prompt_tokens = _tokens(asked, tokenizer)
        tokens = output_tokens or _tokens(answered, tokenizer)
        if prompt_tokens < SHAREGPT_MIN_TOKENS or (output_tokens is None and tokens < SHAREGPT_MIN_TOKENS):
            continue
        if prompt_tokens > SHAREGPT_MAX_PROMPT_TOKENS or prompt_tokens + tokens > SHAREGPT_MAX_TOKENS:
            continue
        found.append(Sample(_written(asked, endpoint, str(path)), tokens))
    if not found:
        raise BadConfig(f"{path}: it holds no conversation of two turns and usual length")
    return found


def read_jsonl(path: Path, endpoint: Endpoint, output_tokens: int) -> list[Sample]:
    """One JSON object a line: `prompt` (text, token ids or messages), `messages`, `question`, `turns` or `text`.

    Optional: `output_tokens` (or `max_tokens`), and `app` or `model`.
    """
    found = []
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise BadConfig(f"{where}: it is no JSON ({error})") from None
            if not isinstance(entry, dict):
                raise BadConfig(f"{where}: it is not an object")
            found.append(_sample(entry, endpoint, output_tokens, where))
    if not found:
        raise BadConfig(f"{path}: it holds no prompts")
    return found


def _sample(entry: Mapping[str, Any], endpoint: Endpoint, output_tokens: int, where: str) -> Sample:
    key = next((key for key in _TEXT_KEYS if entry.get(key)), None)
    if key is None:
        raise BadConfig(f"{where}: there is none of {', '.join(_TEXT_KEYS)}")
    content = entry[key][0] if key == "turns" and isinstance(entry[key], list) else entry[key]
    tokens = next((entry[k] for k in _LENGTH_KEYS if entry.get(k) is not None), output_tokens)
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise BadConfig(f"{where}: {tokens!r} is not a number of tokens")
    return Sample(_written(content, endpoint, where), tokens, str(entry.get("app") or entry.get("model") or ""))


def _written(content: object, endpoint: Endpoint, where: str) -> Written:
    """In the form that the endpoint takes."""
    chat = endpoint is Endpoint.CHAT
    if isinstance(content, str):
        return Written(({"role": "user", "content": content},) if chat else content)
    if isinstance(content, list) and content and all(isinstance(m, dict) for m in content):
        if not chat:
            raise BadConfig(f"{where}: messages need --endpoint chat")
        return Written(tuple(content))
    if isinstance(content, list) and content and all(isinstance(i, int) and not isinstance(i, bool) for i in content):
        if chat:
            raise BadConfig(f"{where}: token ids need --endpoint completions")
        return Written(tuple(content))
    raise BadConfig(f"{where}: the prompt is neither a text, nor token ids, nor messages")


def _tokens(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        return -(-len(text.encode()) // _BYTES_A_TOKEN)
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
