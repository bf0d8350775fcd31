"""Every record that crosses a room, a thread or a wire: frozen msgspec structs, no behaviour beyond derived values.

Pure: imports nothing of ours. What changes over time lives in a named owner elsewhere (a `Sequence` in the batcher, the
`PagePool`), never here.
"""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.Enum):
    """Why a choice ended. `STOP` and `LENGTH` are OpenAI's words; the others reach a client as an error event."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class GrammarKind(enum.Enum):
    """In which language a grammar is written; JSON_OBJECT needs no source."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


class Grammar(msgspec.Struct, frozen=True):
    """What the text of every choice of a request must follow. Compiled where the request runs."""

    kind: GrammarKind
    source: str = ""


class Pooling(enum.Enum):
    """How the hidden states of a prompt become its embedding: their mean, or the last one."""

    MEAN = "mean"
    LAST = "last"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is drawn from logits. Defaults are the identity: pure sampling at temperature 1.

    temperature 0 means greedy; what is so small that it comes to the same was made 0 at the edge. top_k 0 means all.
    seed is always set: the front draws one when the client gave none. logit_bias is sorted by id. logprobs None means
    none; k means the chosen token's and the k likeliest (0 is a request).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    @property
    def needs_history(self) -> bool:
        """True when the draw depends on tokens already seen."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One validated prompt with n choices, as it travels from the front to the node that runs it.

    id is made by the server. stop_ids already contains the model's end tokens unless the client asked to ignore them;
    with min_tokens they are not drawn before that many tokens exist. Stop strings are matched where text is made.
    prompt_logprobs k asks for the log probability of every prompt token but the first, and the k likeliest in its
    place. With pooling nothing is generated: the request ends with the embedding of its prompt.
    """

    id: str
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    """The chosen token's log probability, and exactly the k likeliest; where it is one of them, with the same float."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampled(msgspec.Struct, frozen=True):
    """What the executor returns for one row that was sampled."""

    token: int
    logprob: TokenLogprob | None = None


class Emit(msgspec.Struct, frozen=True):
    """One step's news about one choice: at most one token, or the end, or both. Crosses from device thread to loop.

    A choice's first emit tells how many prompt tokens came from the cache and how long the request waited to start.
    Only one choice of a request tells of cached tokens: the others start from what that one computed. prompt_logprobs
    come with choice 0, in order, over as many emits as the prompt took steps; embedding [hidden] comes with the end.
    """

    request_id: str
    index: int
    token: int | None = None
    logprob: TokenLogprob | None = None
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None


class Delta(msgspec.Struct, frozen=True):
    """News about one choice as the API writes it: text that can no longer change, and the tokens it came from.

    text may lag tokens (held-back UTF-8 and stop strings). After `finish` nothing follows for that index. With finish
    ERROR, `message` is the fixed text for the client.
    """

    index: int
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    queued_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: tuple[float, ...] | None = None
    message: str | None = None


class PageKind(enum.Enum):
    WEIGHTS = "weights"
    KV = "kv"
    SCRATCH = "scratch"


class Owner(msgspec.Struct, frozen=True):
    """Who holds a physical page: a model instance on this node and what for."""

    model: str
    kind: PageKind


class SampleSpec(msgspec.Struct, frozen=True):
    """What the sampler needs for one row beyond its logits.

    position is the index of the token to be drawn, counted from the first generated token (0), choice the index of the
    choice it is drawn for. banned are ids that may not be drawn at this position (stop ids before min_tokens). prompt
    and output are filled only when the sampling needs history.
    """

    sampling: Sampling
    position: int
    choice: int = 0
    banned: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


class Chunk(msgspec.Struct, frozen=True):
    """One sequence's share of a step: compute positions start … start+len(tokens)-1, over `pages`; sample if asked.

    pages is the sequence's page table up to the last position of the chunk; page i holds positions
    i·page_tokens … (i+1)·page_tokens-1.
    """

    sequence: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: SampleSpec | None = None


class PageCopy(msgspec.Struct, frozen=True):
    """Copy page `source` to page `target` before the step runs; the sequence needs only the start of it."""

    source: int
    target: int


class Batch(msgspec.Struct, frozen=True):
    """One step of one model: what the executor runs. Results come back in the order of chunks that sample."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[PageCopy, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(c.tokens) for c in self.chunks)


class ModelCard(msgspec.Struct, frozen=True):
    """What `/v1/models` says of a served model."""

    id: str
    created_s: int
    context_tokens: int
    parameters: int
    weight_bytes: int
    dtype: str
    family: str


class BatcherStats(msgspec.Struct, frozen=True):
    """A snapshot for gauges; counters only grow."""

    running: int
    waiting: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    computed_tokens: int
    sampled_tokens: int
