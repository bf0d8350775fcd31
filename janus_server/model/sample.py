"""From logits to tokens: penalties, bias, temperature, top-k, top-p, min-p, and the draw. numpy on the host.

A draw depends on the row's logits and its SampleSpec alone: the random number is a hash of (seed, choice, position), so
the same seed gives the same text whatever else is in the batch, after preemption, and on another node.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from janus_server.errors import require
from janus_server.types import Sampled, SampleSpec, Sampling, TokenLogprob

# Nucleus sampling looks at this many likeliest tokens first; a full sort of a 152k vocabulary costs ten times as much.
_NUCLEUS_GUESS = 1024
# Past these float32 has only infinities, and the difference of two infinities is no number.
_LARGEST = float(np.finfo(np.float32).max)


def sample(logits: np.ndarray, specs: list[SampleSpec]) -> list[Sampled]:
    """One token for each row. logits [R, vocab] f32 are read, not changed. Raises Bug when a row is not finite."""
    best = logits.argmax(axis=1)
    highest = logits[np.arange(len(best)), best]
    require(bool(np.isfinite(highest).all()), "the model produced logits that are not finite")
    return [
        Sampled(int(best[i])) if _is_plain_greedy(spec) else _sample_row(logits[i], spec)
        for i, spec in enumerate(specs)
    ]  # fmt: skip


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) for token `position` of choice `choice` under `seed`."""
    word = seed.to_bytes(16, "little", signed=True) + choice.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _is_plain_greedy(spec: SampleSpec) -> bool:
    s = spec.sampling
    return s.temperature == 0.0 and s.logprobs is None and not (s.logit_bias or spec.banned or s.needs_history)


def _sample_row(raw: np.ndarray, spec: SampleSpec) -> Sampled:
    s = spec.sampling
    logits = _adjust(raw, spec)
    if s.temperature == 0.0:
        token = int(logits.argmax())
    else:
        token = _draw(logits, s, uniform(s.seed, spec.choice, spec.position))
    return Sampled(token, None if s.logprobs is None else logprob_of(raw, token, s.logprobs))


def logprob_of(raw: np.ndarray, token: int, top: int) -> TokenLogprob:
    """The model's own log probability of `token` (before penalties and temperature) and of exactly the `top` likeliest.

    Where the token is one of those, its float is identical in both places: clients compare them to tell greediness.
    """
    high = raw.max()
    normaliser = float(high) + float(np.log(np.exp(raw - high, dtype=np.float32).sum(dtype=np.float64)))
    pairs = tuple((int(i), float(raw[i]) - normaliser) for i in _likeliest(raw, top))
    return TokenLogprob(token, float(raw[token]) - normaliser, pairs)


def _adjust(raw: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """A copy with bias, then penalties, then bans applied; one token at least that is not banned stays finite.

    vLLM documents that order: a repetition penalty scales what the bias left. OpenAI's own two penalties only add, as
    the bias does, so for them the order does not show.
    """
    s = spec.sampling
    logits = raw.astype(np.float32, copy=True)
    for token, bias in s.logit_bias:
        logits[token] += bias
    if s.needs_history:
        seen = np.unique(np.asarray(spec.prompt + spec.output, dtype=np.int64))
        if s.repetition_penalty != 1.0:
            known = logits[seen]
            with np.errstate(over="ignore"):
                known = np.where(known > 0, known / s.repetition_penalty, known * s.repetition_penalty)
            logits[seen] = np.clip(known, -_LARGEST, _LARGEST)
        if spec.output:
            ids, counts = np.unique(np.asarray(spec.output, dtype=np.int64), return_counts=True)
            logits[ids] -= (s.frequency_penalty * counts + s.presence_penalty).astype(np.float32)
    if spec.banned:
        banned = list(spec.banned)
        logits[banned] = -np.inf
        if np.isneginf(logits.max()):  # the model had nothing else in mind: whatever is allowed is as good as any
            logits[:] = 0.0
            logits[banned] = -np.inf
    return logits


def _draw(logits: np.ndarray, s: Sampling, u: float) -> int:
    """Invert the cumulative distribution over the kept tokens, likeliest first, at u. s.temperature is above 0.

    No temperature that a float can hold makes a NaN: what falls off the far end is -inf, a weight of 0.
    """
    with np.errstate(over="ignore"):
        scaled = (logits - logits.max()) / np.float32(min(s.temperature, _LARGEST))
    if s.min_p > 0.0:
        scaled = np.where(scaled >= math.log(s.min_p), scaled, np.float32(-np.inf))
    if s.top_k == 0 and s.top_p >= 1.0:
        ids = np.arange(len(scaled))
        weights = np.exp(scaled, dtype=np.float32)
    else:
        ids, weights = _nucleus(scaled, s)
    cumulative = np.cumsum(weights, dtype=np.float64)
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    at = min(at, len(ids) - 1)
    while weights[at] == 0.0 and at > 0:  # rounding may land on the flat end of the curve
        at -= 1
    return int(ids[at])


def _nucleus(scaled: np.ndarray, s: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights kept by top-k, then by top-p of what is left; likeliest first."""
    vocab = len(scaled)
    k = min(s.top_k, vocab) if s.top_k else vocab
    if s.top_p >= 1.0:
        ids = _likeliest(scaled, k)
        return ids, np.exp(scaled[ids], dtype=np.float32)
    total = None if s.top_k else float(np.exp(scaled, dtype=np.float32).sum(dtype=np.float64))
    looked = min(k, _NUCLEUS_GUESS)
    while True:
        ids = _likeliest(scaled, looked)
        weights = np.exp(scaled[ids], dtype=np.float32)
        cumulative = np.cumsum(weights, dtype=np.float64)
        whole = total if total is not None else float(cumulative[-1])
        if looked == k or (total is not None and cumulative[-1] >= s.top_p * whole):
            break
        looked = k
    keep = int(np.searchsorted(cumulative, s.top_p * whole, side="left")) + 1
    return ids[:keep], weights[:keep]


def _likeliest(values: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k highest values, highest first, ties by lower id."""
    if k <= 0:
        return np.empty(0, dtype=np.int64)
    if k < len(values):
        bound = np.partition(values, len(values) - k)[len(values) - k]
        ids = np.flatnonzero(values >= bound)
    else:
        ids = np.arange(len(values))
    order = np.lexsort((ids, -values[ids]))
    return ids[order[:k]]
