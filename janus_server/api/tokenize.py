"""The bodies and answers of /tokenize, /detokenize and /tokenizer_info, as vLLM shapes them.

Pure. `http/tokenize` calls `parse_*`, lets the tokenizer work, and encodes one of the answers here; `openapi` reads the
same records. What a prompt becomes here is what /v1/completions would run, and likewise for messages and chat.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from janus_server.api import bodies, parse
from janus_server.api.bodies import NAME_CHARS, Limits, Message, NotYet
from janus_server.api.parse import need
from janus_server.errors import Refused

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a conversation, never both. model may be left out where one model is served."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: NotYet = None
    chat_template: NotYet = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: Name | None = None
    tokens: list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    """token_strs are the entries of the vocabulary as they are written there, in the order of tokens."""

    count: Annotated[int, Meta(ge=0)]
    max_model_len: Annotated[int, Meta(ge=1)]
    tokens: list[Annotated[int, Meta(ge=0)]]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """What a client needs to tokenize by itself. tokenizer_class is the kind of the vocabulary's model, such as BPE."""

    tokenizer_class: str
    vocab_size: Annotated[int, Meta(ge=1)]
    max_model_len: Annotated[int, Meta(ge=1)]
    model: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None


ALLOWED: Mapping[str, str] = types.MappingProxyType({
    **bodies.ALLOWED,
    **bodies.plain_fields(TokenizeBody),
    "model": f"the name of a served model, a string of 1 to {NAME_CHARS} characters",
    "tokens": "a list of token ids",
    "tools": "a list of objects",
})  # fmt: skip


def parse_tokenize(raw: bytes, limits: Limits) -> TokenizeBody:
    """The body of /tokenize; exactly one of prompt and messages is given."""
    body = parse.decode(raw, TokenizeBody, ALLOWED)
    for name in ("continue_final_message", "chat_template"):
        if getattr(body, name):
            raise Refused(f"{name} is not supported yet", param=name, code="unsupported_parameter")
    if body.messages is None:
        need(body.prompt is not None, "prompt", "given, or messages instead of it")
        return body
    need(body.prompt is None, "prompt", "left out when messages are given")
    need(0 < len(body.messages) <= limits.messages, "messages", f"a list of 1 to {limits.messages} messages")
    need(body.add_special_tokens is not True, "add_special_tokens", "false for messages: the template writes them")
    return body


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """The body of /detokenize; `check_ids` checks its ids against the model that it names."""
    return parse.decode(raw, DetokenizeBody, ALLOWED)


def check_ids(tokens: Sequence[int], vocab: int) -> None:
    """Refuse ids outside 0 … vocab-1, naming the first one's place."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocab):
        return
    at = next(i for i, token in enumerate(tokens) if not 0 <= token < vocab)
    where = f"tokens[{at}]"
    raise Refused(f"{where} must be a token id from 0 to {vocab - 1}", param=where, code="invalid_value")
