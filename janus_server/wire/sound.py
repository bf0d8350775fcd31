"""Whether a request that another node sends is one that a node may send. Pure.

The other node has checked what its client wrote, and it knows the secret; still, a number that could not be must not
reach the device thread from here. What depends on the model (its vocabulary, its context) the executing node checks.
"""

from __future__ import annotations

import math
from typing import Final

from janus_server.types import Promise, Request, Sampling
from janus_server.wire.frames import Run

# Far above what the API takes (api/bodies), below what would be a danger by itself.
MOST_CHOICES: Final = 4096
MOST_STOPS: Final = 4096
MOST_LOGPROBS: Final = 1024
_MOST_TOKENS: Final = 1 << 31
_MOST_NAME: Final = 512


def sound(run: Run) -> bool:
    """True for a request that can be run."""
    return (
        _sound_request(run.request)
        and _sound_progress(run)
        and (run.lend is None or _bare(run))
        and (run.helper is None or (len(run.helper.node) <= _MOST_NAME and 0 <= run.helper.tokens < _MOST_TOKENS))
    )


def _sound_request(request: Request) -> bool:
    names = (request.id, request.model, request.tenant, request.application)
    return (
        all(len(name) <= _MOST_NAME for name in names)
        and bool(request.id and request.model and request.prompt)
        and 1 <= request.n <= MOST_CHOICES
        and 0 <= request.min_tokens <= _MOST_TOKENS
        and 0 <= request.max_tokens <= _MOST_TOKENS
        and min(request.prompt) >= 0
        and max(request.prompt) < _MOST_TOKENS
        and len(request.stop) <= MOST_STOPS
        and all(request.stop)
        and all(0 <= token < _MOST_TOKENS for token in (*request.stop_ids, *request.shown_ids))
        and -(1 << 31) <= request.priority < 1 << 31
        and (request.prompt_logprobs is None or 0 <= request.prompt_logprobs <= MOST_LOGPROBS)
        and _sound_sampling(request.sampling)
        and _sound_promise(request.promise)
    )


def _sound_sampling(sampling: Sampling) -> bool:
    numbers = (
        sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty, sampling.presence_penalty,
        sampling.frequency_penalty, *(bias for _, bias in sampling.logit_bias),
    )  # fmt: skip
    return (
        all(map(math.isfinite, numbers))
        and sampling.temperature >= 0.0
        and 0.0 <= sampling.top_p <= 1.0
        and 0.0 <= sampling.min_p <= 1.0
        and sampling.repetition_penalty > 0.0
        and 0 <= sampling.top_k < _MOST_TOKENS
        and -(1 << 63) <= sampling.seed < 1 << 63
        and all(0 <= token < _MOST_TOKENS for token, _ in sampling.logit_bias)
        and (sampling.logprobs is None or 0 <= sampling.logprobs <= MOST_LOGPROBS)
    )


def _sound_promise(promise: Promise | None) -> bool:
    if promise is None:
        return True
    limits = (promise.ttft_s, promise.tpot_s)
    return 0.0 < promise.attain <= 1.0 and all(one is None or (math.isfinite(one) and one > 0.0) for one in limits)


def _sound_progress(run: Run) -> bool:
    """Each choice at most once, and none that the request does not have."""
    begun = [known.index for known in run.known]
    named = [*begun, *run.ended]
    return (
        len(set(begun)) == len(begun)
        and len(set(run.ended)) == len(run.ended)
        and len(set(run.ended)) < run.request.n
        and all(index < run.request.n for index in named)
        and all(len(known.tokens) <= run.request.max_tokens for known in run.known)
    )


def _bare(run: Run) -> bool:
    """A prompt whose pages are to be lent comes to nothing else."""
    request = run.request
    alone = (request.n, request.max_tokens) == (1, 0) and not run.known and run.helper is None
    return alone and request.prompt_logprobs is None and request.pooling is None and request.grammar is None
