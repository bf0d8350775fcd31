"""What one sequence asks of a step: the rows to compute, the token to draw, and what is read of the rows besides.

Pure. The batcher decides how many rows a sequence gets and calls `chunk_of`; nothing here changes a sequence but for
the copy of its grammar's matcher and its record of seen tokens, made when the choice first draws.
"""

from __future__ import annotations

from janus_server.kv.blocks import pages_for
from janus_server.sched.seen import Seen, distinct
from janus_server.sched.sequence import Sequence
from janus_server.types import Chunk, Pooling, PoolSpec, SampleSpec, ScoreSpec


def reusable(seq: Sequence) -> int:
    """How many of its first positions a sequence may take from a cache.

    The last known token is always computed, since something is drawn or read there, and so is every row still to read.
    """
    last = len(seq.tokens) - 1
    return min(last, seq.read) if seq.read < seq.to_read else last


def chunk_of(seq: Sequence, n: int, page_tokens: int) -> Chunk:
    """The next n rows of a sequence; it samples where they reach the last known token, unless it generates nothing."""
    start, end = seq.computed, seq.computed + n
    sample = _sample_spec(seq) if end == len(seq.tokens) and seq.request.max_tokens else None
    read = _read_spec(seq, start, end) if seq.read < seq.to_read else None
    pages = tuple(seq.pages[: pages_for(end, page_tokens)])
    return Chunk(seq.number, start, tuple(seq.tokens[start:end]), pages, sample, read)


def _sample_spec(seq: Sequence) -> SampleSpec:
    request = seq.request
    if seq.matcher is None and seq.grammar is not None:
        seq.matcher = seq.grammar.copy()
    if seq.seen is None and request.sampling.needs_history:
        seq.seen = Seen(distinct(request.prompt))
    return SampleSpec(
        sampling=request.sampling,
        position=seq.generated,
        choice=seq.index,
        banned=request.stop_ids if seq.generated < request.min_tokens else (),
        history=None if seq.seen is None else seq.seen.history(),
        matcher=seq.matcher,
    )


def _read_spec(seq: Sequence, start: int, end: int) -> ScoreSpec | PoolSpec | None:
    """What is still to be read of rows start … end-1; rows that were read before a preemption are not read again."""
    first, stop = max(start, seq.read), min(end, seq.to_read)
    if first >= stop:
        return None
    request = seq.request
    if request.prompt_logprobs is not None:
        return ScoreSpec(first - start, request.prompt[first + 1 : stop + 1], request.prompt_logprobs)
    rows = 1 if request.pooling is Pooling.LAST else len(request.prompt)
    return PoolSpec(first - start, seq.sums, rows if stop == seq.to_read else None)
