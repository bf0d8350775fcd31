"""/v1/embeddings: its body and its bounds, the call that computes it, and its answer. OpenAI's forms.

Pure. `http/embed` encodes what `inputs_of` gives and runs the call that `plan_embeddings` makes; `EmbeddingReply`
writes the answer. `pooling` and `normalize` are fields of ours: any causal model has hidden states, and only who uses
the vectors knows which of them it wants.
"""

from __future__ import annotations

import base64
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from janus_server.api import bodies, parse
from janus_server.api.bodies import NAME_CHARS, Limits, NotYet, Positive
from janus_server.api.checks import need, refuse_given
from janus_server.api.plan import Call, Kind, Label, Target, check_ids
from janus_server.errors import Refused, require
from janus_server.types import Delta, Pooling, Request

if TYPE_CHECKING:
    from janus_server.tokens.tokenizer import Tokenizer


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """What OpenAI's embeddings take, and two fields of ours."""

    model: Annotated[str, Meta(min_length=1, max_length=NAME_CHARS)]
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None
    pooling: Literal["mean", "last"] | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: NotYet = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or with encoding_format base64 the little-endian float32 of them."""

    object: Literal["embedding"]
    index: Annotated[int, Meta(ge=0)]
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: Annotated[int, Meta(ge=0)]
    total_tokens: Annotated[int, Meta(ge=0)]


class EmbeddingList(msgspec.Struct, kw_only=True):
    """The vectors of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


ALLOWED: Mapping[str, str] = types.MappingProxyType({
    **bodies.plain_fields(EmbeddingBody),
    "model": bodies.ALLOWED["model"],
    "input": "a text, a list of texts, a list of token ids, or a list of lists of token ids, and none of them empty",
    "encoding_format": "float or base64",
    "pooling": "mean or last",
})  # fmt: skip


def parse_embedding(raw: bytes, limits: Limits) -> EmbeddingBody:
    """The body of /v1/embeddings, its fields in range; what depends on the model is checked by `plan_embeddings`."""
    body = parse.decode(raw, EmbeddingBody, ALLOWED)
    refuse_given(body, ("truncate_prompt_tokens",))
    inputs = inputs_of(body)
    need(len(inputs) <= limits.inputs, "input", f"at most {limits.inputs} inputs in one call")
    need(len(inputs) > 0 and all(inputs), "input", ALLOWED["input"])
    return body


def inputs_of(body: EmbeddingBody) -> tuple[str | list[int], ...]:
    """The inputs, each a text or a list of ids; a mixture is refused."""
    given = body.input
    if isinstance(given, str):
        return (given,)
    if given and all(isinstance(item, int) for item in given):
        return ([item for item in given if isinstance(item, int)],)
    need(len({type(item) for item in given}) <= 1, "input", ALLOWED["input"])
    return tuple(item for item in given if not isinstance(item, int))


def plan_embeddings(
    body: EmbeddingBody, prompts: Sequence[Sequence[int]], target: Target, limits: Limits, label: Label
) -> Call:
    """The call that computes the embeddings of a body whose encoded inputs are `prompts`."""
    need(
        body.dimensions in (None, target.hidden), "dimensions",
        f"{target.hidden} or left out: this model's vectors have that length and lose their meaning when cut",
    )  # fmt: skip
    most = limits.embedding_values // max(target.hidden, 1)
    need(len(prompts) <= most, "input", f"at most {most} inputs in one call for this model")
    tokens = sum(map(len, prompts))
    need(tokens <= limits.total_tokens, "input", f"at most {limits.total_tokens} tokens in one call")
    for place, prompt, name in zip(_places(body), prompts, _id_lists(body), strict=True):
        need(len(prompt) > 0, place, "at least one token long")
        if len(prompt) > target.context_tokens:
            raise Refused(
                f"{place} has {len(prompt)} tokens, more than the model's context of {target.context_tokens} tokens",
                param="input", code="context_length_exceeded",
            )  # fmt: skip
        check_ids(prompt, target.vocab, name, Kind.EMBEDDING.param)
    pooling = target.pooling if body.pooling is None else Pooling(body.pooling)
    requests = tuple(
        Request(id=f"{label.id}-{i}", model=target.model, prompt=tuple(prompt), max_tokens=0, pooling=pooling)
        for i, prompt in enumerate(prompts)
    )
    return Call(
        kind=Kind.EMBEDDING, label=label, model=body.model, requests=requests, n=1, stream=False, include_usage=False,
        continuous_usage=False, logprobs=False, echo=("",) * len(requests),
    )  # fmt: skip


class EmbeddingForm(msgspec.Struct, frozen=True):
    """How vectors are written. OpenAI's have length 1."""

    base64: bool = False
    unit_length: bool = True


def form_of(body: EmbeddingBody) -> EmbeddingForm:
    return EmbeddingForm(body.encoding_format == "base64", body.normalize is not False)


class EmbeddingReply:
    """The answer of one embeddings call, gathered input by input."""

    def __init__(self, form: EmbeddingForm, call: Call, tokenizer: Tokenizer) -> None:
        self._form = form
        self._call = call
        self._vectors: list[np.ndarray | None] = [None] * len(call.requests)

    def add(self, prompt: int, delta: Delta) -> None:
        if delta.embedding is not None:
            self._vectors[prompt] = np.array(delta.embedding, np.float32)

    def body(self) -> bytes:
        """The JSON body; every input must have ended."""
        tokens = self._call.prompt_tokens
        answer = {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._written(vector)}
                for index, vector in enumerate(self._vectors)
            ],
            "model": self._call.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        return msgspec.json.encode(answer)

    def _written(self, vector: np.ndarray | None) -> Any:
        require(vector is not None, "an embedding is written before it was computed")
        numbers: np.ndarray = np.zeros(0, np.float32) if vector is None else vector
        if self._form.unit_length:
            length = float(np.linalg.norm(numbers.astype(np.float64)))
            numbers = (numbers / (length or 1.0)).astype(np.float32)
        if self._form.base64:
            return base64.b64encode(numbers.astype("<f4").tobytes()).decode("ascii")
        return numbers.tolist()


def _places(body: EmbeddingBody) -> tuple[str, ...]:
    """The path of each input in the body."""
    one = isinstance(body.input, str) or isinstance(body.input[0], int)
    return ("input",) if one else tuple(f"input[{i}]" for i in range(len(body.input)))


def _id_lists(body: EmbeddingBody) -> tuple[str, ...]:
    """The path of each input that is a list of ids, "" for a text."""
    return tuple(
        "" if isinstance(given, str) else place for given, place in zip(inputs_of(body), _places(body), strict=True)
    )
