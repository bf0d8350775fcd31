"""The bodies that clients send, as msgspec records, and the bounds on them; `api` reads them, `http` hands them around.

Every optional field is nullable: None means "not given", so that a model's own defaults can fill it. Ranges that OpenAI
publishes live in the annotations; bounds that an operator may change live in `Limits`. Fields that are not declared are
ignored. A field that would change the answer but is not supported yet is declared and refused by name (`UNSUPPORTED`),
never ignored.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Unit = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request; beyond them it is refused before it costs anything.

    total_tokens bounds n · prompts · max_tokens of one call. logprobs is 20 in both APIs, although OpenAI's completions
    stop at 5. stall_s is how long a reader may leave a full socket before its request is cancelled. Text longer than
    inline_chars is encoded on a thread of its own (2048 characters take about 0.5 ms); text longer than hopeless_chars
    is first checked against what the context could hold.
    """

    body_bytes: int = 4 << 20
    body_s: float = 60.0
    header_line_bytes: int = 16 * 1024
    headers: int = 128
    n: int = 128
    prompts: int = 1024
    choices: int = 2048
    messages: int = 4096
    stops: int = 16
    stop_chars: int = 1024
    stop_ids: int = 256
    logit_bias: int = 1024
    logprobs: int = 20
    total_tokens: int = 4 * 1024 * 1024
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    inline_chars: int = 2048
    hopeless_chars: int = 1 << 16
    encode_threads: int = 2
    shutdown_s: float = 1.0


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content. Only text can be served; the tokenizer refuses the others by their place."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class CommonBody(msgspec.Struct, kw_only=True):
    """What chat and completions share: the one inheritance of fields, so that their ranges cannot drift apart."""

    model: Annotated[str, Meta(min_length=1, max_length=512)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    min_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Unit | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Natural] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    # Refused when asked for (see UNSUPPORTED).
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    prompt_logprobs: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    cache_salt: Any = None


class ChatBody(CommonBody, kw_only=True):
    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    # Refused when asked for.
    functions: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    audio: Any = None
    echo: Any = None


class CompletionBody(CommonBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: Natural | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    # Refused when asked for.
    suffix: Any = None
    prompt_embeds: Any = None


UNSUPPORTED: tuple[str, ...] = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "grammar",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "use_beam_search",
    "truncate_prompt_tokens",
    "logits_processors",
    "cache_salt",
)
UNSUPPORTED_CHAT: tuple[str, ...] = (
    *UNSUPPORTED,
    "functions",
    "chat_template",
    "continue_final_message",
    "documents",
    "audio",
    "echo",
)
UNSUPPORTED_COMPLETION: tuple[str, ...] = (*UNSUPPORTED, "suffix", "prompt_embeds")

_FLAG = "true or false"
_COUNT = "a whole number of at least 1"

# What each field may hold, by its path with the indices left out: the second half of "<path> must be …".
ALLOWED: Mapping[str, str] = types.MappingProxyType({
    "model": "the name of a served model, a string of 1 to 512 characters",
    "messages": "a list of at least one message, each an object with 'role' and 'content'",
    "messages[]": "an object with 'role' and 'content'",
    "messages[].role": "one of developer, system, user, assistant, tool",
    "messages[].content": "a string, null, or a list of parts such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[]": "an object such as {\"type\": \"text\", \"text\": \"…\"}",
    "messages[].content[].type": "a string such as \"text\"",
    "messages[].content[].text": "a string",
    "messages[].name": "a string",
    "messages[].tool_calls": "a list of objects",
    "messages[].tool_call_id": "a string",
    "messages[].reasoning_content": "a string",
    "prompt": "a string, a list of strings, a list of token ids, or a list of lists of token ids, and not empty",
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": "a whole number of at least 0",
    "temperature": "a number from 0 to 2",
    "top_p": "a number from 0 to 1",
    "top_k": "a whole number of at least 0, or -1 for all",
    "min_p": "a number from 0 to 1",
    "presence_penalty": "a number from -2 to 2",
    "frequency_penalty": "a number from -2 to 2",
    "repetition_penalty": "a number from 0.01 to 100",
    "seed": "a whole number that fits in 64 bits, signed",
    "n": _COUNT,
    "best_of": "a whole number equal to n",
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "include_stop_str_in_output": _FLAG,
    "ignore_eos": _FLAG,
    "logit_bias": "an object from token id to a number from -100 to 100",
    "logprobs": "true or false in chat, a whole number of at least 0 in completions",
    "top_logprobs": "a whole number of at least 0",
    "stream": _FLAG,
    "stream_options": "an object with include_usage and continuous_usage_stats",
    "stream_options.include_usage": _FLAG,
    "stream_options.continuous_usage_stats": _FLAG,
    "skip_special_tokens": _FLAG,
    "add_special_tokens": _FLAG,
    "add_generation_prompt": _FLAG,
    "chat_template_kwargs": "an object",
    "echo": _FLAG,
    "tools": "a list",
    "tool_choice": "a string or an object",
    "response_format": "an object with 'type'",
})  # fmt: skip
