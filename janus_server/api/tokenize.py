"""The bodies and answers of /tokenize, /detokenize and /tokenizer_info, as vLLM shapes them.

Pure. `http/tokenize` calls `parse_*`, lets the tokenizer work, and encodes one of the answers here; `openapi` reads the
same records. What a prompt becomes here is what /v1/completions would run; messages are checked and encoded as chat's.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from janus_server.api import bodies, parse
from janus_server.api.bodies import NAME_CHARS, ChatBody, Limits, Message, NotYet
from janus_server.api.checks import need, refuse_given
from janus_server.api.tool_bodies import NamedChoice, Tool

Name = Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]


class TokenizeBody(msgspec.Struct, kw_only=True):
    """A text or a conversation, never both. model may be left out where one model is served."""

    model: Name | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
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
})  # fmt: skip


def parse_tokenize(raw: bytes, limits: Limits) -> TokenizeBody:
    """The body of /tokenize; exactly one of prompt and messages is given."""
    body = parse.decode(raw, TokenizeBody, ALLOWED)
    refuse_given(body, ("continue_final_message", "chat_template"))
    if body.messages is None:
        need(body.prompt is not None, "prompt", "given, or messages instead of it")
        return body
    need(body.prompt is None, "prompt", "left out when messages are given")
    parse.check_chat(chat_of(body), limits)
    return body


def chat_of(body: TokenizeBody) -> ChatBody:
    """The chat body that has the prompt of these messages: with every field that a prompt depends on."""
    return ChatBody(
        model=body.model or "",
        messages=body.messages or [],
        add_special_tokens=body.add_special_tokens,
        add_generation_prompt=body.add_generation_prompt,
        tools=body.tools,
        tool_choice=body.tool_choice,
        reasoning_effort=body.reasoning_effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def parse_detokenize(raw: bytes) -> DetokenizeBody:
    """The body of /detokenize; `plan.check_ids` checks its ids against the model that it names."""
    return parse.decode(raw, DetokenizeBody, ALLOWED)
