"""The shapes of what `reply` and the small routes write, as records: the second half of what /openapi.json says.

Pure, and never used to write: `reply` writes by hand because a token may cost microseconds only. `openapi` makes
schemas of these records, and a test reads real answers into them, so the two cannot drift apart. A field that may be
missing has the default UNSET.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
Reason = Literal["stop", "length", "tool_calls"]


class ErrorDetails(msgspec.Struct, kw_only=True):
    """What went wrong. param names the field of the body, code is for programs and message for people."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """The body of every answer that is not a success, on every route."""

    error: ErrorDetails


class CachedTokens(msgspec.Struct, kw_only=True):
    cached_tokens: Count


class ReasoningTokens(msgspec.Struct, kw_only=True):
    reasoning_tokens: Count


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of one call: the prompt once, all choices summed."""

    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class MadeFunction(msgspec.Struct, kw_only=True):
    """arguments is a JSON text; in a stream it comes in pieces, and the name only once."""

    arguments: str
    name: str | UnsetType = UNSET


class MadeCall(msgspec.Struct, kw_only=True):
    function: MadeFunction
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    index: Count | UnsetType = UNSET


class TokenChance(msgspec.Struct, kw_only=True):
    """One token and its log probability; bytes are the exact ones, also where they are half a character."""

    token: str
    logprob: float
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None


class TokenChances(TokenChance, kw_only=True):
    top_logprobs: list[TokenChance]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenChances] | None
    refusal: None


class ChatAnswerMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: UnsetType | None = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: Count
    message: ChatAnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of a message. The role comes with a choice's first event."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[MadeCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """The JSON of one event of a streamed chat answer; the last event is the text [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class TextLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry a token; with echo the first token of the prompt has no log probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class TextChoice(msgspec.Struct, kw_only=True):
    """Choice j of prompt i has index i·n + j. In a stream finish_reason is null before the end."""

    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """An answer to a completion call, and the JSON of one event when it is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """What /v1/responses answers with; output holds messages, reasoning and function calls in OpenAI's forms."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class MessageAnswer(msgspec.Struct, kw_only=True):
    """What /v1/messages answers with; content holds text, thinking and tool_use blocks in Anthropic's forms."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class TypedEvent(msgspec.Struct, kw_only=True):
    """One event of a stream that names its events; the other fields depend on type."""

    type: str


class InputTokens(msgspec.Struct, kw_only=True):
    input_tokens: Count


class MessagesError(msgspec.Struct, kw_only=True):
    """A failure in Anthropic's form, which the routes below /v1/messages use."""

    type: Literal["error"]
    error: ErrorDetails


class ModelMeta(msgspec.Struct, kw_only=True):
    parameters: Count
    weight_bytes: Count
    dtype: str
    family: str
    fingerprint: str


class Model(msgspec.Struct, kw_only=True):
    """A served name; max_model_len is the longest prompt plus answer in tokens.

    parent is null for a model. For an application of one, root and parent name the model.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: Annotated[int, Meta(ge=1)]
    meta: ModelMeta


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]


class Alive(msgspec.Struct, kw_only=True):
    status: str


class Version(msgspec.Struct, kw_only=True):
    version: str
