"""From logits to tokens: bias, penalties, grammar, temperature, top-k, top-p, min-p, and the draw. numpy on the host.

A draw depends on the row's logits and its SampleSpec alone: the random number is a hash of (seed, choice, position), so
the same seed gives the same text whatever else is in the batch, after preemption, and on another node. A row that
cannot be drawn from has a fault in its place; it never disturbs another.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

from janus_server.types import Fault, History, Sampled, SampleSpec, Sampling, TokenLogprob

# Nucleus sampling looks at this many likeliest tokens first; a full sort of a 152k vocabulary costs ten times as much.
_NUCLEUS_GUESS = 1024
# Past these float32 has only infinities, and the difference of two infinities is no number.
_LARGEST = float(np.finfo(np.float32).max)


def sample(logits: np.ndarray, specs: list[SampleSpec]) -> list[Sampled]:
    """One token for each row, or its fault. logits [R, vocab] f32 are read, not changed; matchers are advanced."""
    best = logits.argmax(axis=1)  # a NaN counts as the highest
    finite = np.isfinite(logits[np.arange(len(best)), best]).tolist()
    return [
        Sampled(None, fault=Fault.NOT_FINITE)
        if not finite[i]
        else Sampled(int(best[i]))
        if _is_plain_greedy(spec)
        else _sample_row(logits[i], spec)
        for i, spec in enumerate(specs)
    ]


def uniform(seed: int, choice: int, position: int) -> float:
    """The random number in [0, 1) for token `position` of choice `choice` under `seed`."""
    word = seed.to_bytes(16, "little", signed=True) + choice.to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(word, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def _is_plain_greedy(spec: SampleSpec) -> bool:
    s = spec.sampling
    adjusted = s.logit_bias or spec.banned or s.needs_history or spec.matcher is not None
    return s.temperature == 0.0 and s.logprobs is None and not adjusted


def _sample_row(raw: np.ndarray, spec: SampleSpec) -> Sampled:
    logits = _adjust(raw, spec)
    if spec.matcher is None:
        _ban(logits, spec.banned)
        token, done = _pick(logits, spec), False
    else:
        allowed = _allowed(spec, len(raw))
        if len(allowed) == 0:  # a grammar may be complete before anything was drawn
            return Sampled(None, done=True) if spec.matcher.done else Sampled(None, fault=Fault.GRAMMAR)
        logits = logits[allowed]
        _none_to_any(logits)
        token = int(allowed[_pick(logits, spec)])
        if not spec.matcher.accept(token):
            return Sampled(None, fault=Fault.GRAMMAR)
        done = spec.matcher.done
    top = spec.sampling.logprobs
    return Sampled(token, None if top is None else logprob_of(raw, token, top), done)


def _pick(logits: np.ndarray, spec: SampleSpec) -> int:
    """The index that is drawn from adjusted logits; one of them at least is finite."""
    s = spec.sampling
    if s.temperature == 0.0:
        return int(logits.argmax())
    return _draw(logits, s, uniform(s.seed, spec.choice, spec.position))


def _allowed(spec: SampleSpec, vocab: int) -> np.ndarray:
    """Ids that the grammar allows next, ascending; without the banned ones, unless it allows nothing else."""
    allowed: np.ndarray = spec.matcher.mask()
    if spec.matcher.failed or spec.matcher.done:
        return allowed[:0]
    allowed = allowed[: int(np.searchsorted(allowed, vocab))]  # a tokenizer may know ids that the model does not
    if spec.banned:
        kept = allowed[~np.isin(allowed, np.asarray(spec.banned))]
        return kept if len(kept) else allowed
    return allowed


def logprob_of(raw: np.ndarray, token: int, top: int) -> TokenLogprob:
    """The model's own log probability of `token` (before penalties and temperature) and of exactly the `top` likeliest.

    Where the token is one of those, its float is identical in both places: clients compare them to tell greediness.
    """
    high = raw.max()
    normaliser = float(high) + float(np.log(np.exp(raw - high, dtype=np.float32).sum(dtype=np.float64)))
    pairs = tuple((int(i), float(raw[i]) - normaliser) for i in _likeliest(raw, top))
    return TokenLogprob(token, float(raw[token]) - normaliser, pairs)


def _adjust(raw: np.ndarray, spec: SampleSpec) -> np.ndarray:
    """A copy with bias, then penalties applied.

    vLLM documents that order: a repetition penalty scales what the bias left. OpenAI's own two penalties only add, as
    the bias does, so for them the order does not show.
    """
    s = spec.sampling
    logits = raw.astype(np.float32, copy=True)
    for token, bias in s.logit_bias:
        logits[token] += bias
    if spec.history is not None:
        _penalise(logits, s, spec.history)
    return logits


def _penalise(logits: np.ndarray, s: Sampling, history: History) -> None:
    """Repetition for what was read or drawn, then frequency and presence for what was drawn. In place."""
    if s.repetition_penalty != 1.0:
        for ids in (history.prompt, history.fresh):  # no id is in both
            known = logits[ids]
            with np.errstate(over="ignore"):
                known = np.where(known > 0, known / s.repetition_penalty, known * s.repetition_penalty)
            logits[ids] = np.clip(known, -_LARGEST, _LARGEST)
    logits[history.drawn] -= (s.frequency_penalty * history.counts + s.presence_penalty).astype(np.float32)


def _ban(logits: np.ndarray, banned: tuple[int, ...]) -> None:
    """Make tokens impossible, in place; one at least that is not banned stays finite."""
    if banned:
        ids = list(banned)
        logits[ids] = -np.inf
        if np.isneginf(logits.max()):
            logits[:] = 0.0
            logits[ids] = -np.inf


def _none_to_any(logits: np.ndarray) -> None:
    """Where the model has none of these tokens in mind, whatever is allowed is as good as any. In place."""
    if np.isneginf(logits.max()):
        logits[:] = 0.0


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
    if k == 1:
        return np.array([values.argmax()])
    if k < len(values):
        bound = np.partition(values, len(values) - k)[len(values) - k]
        ids = np.flatnonzero(values >= bound)
    else:
        ids = np.arange(len(values))
    order = np.lexsort((ids, -values[ids]))
    return ids[order[:k]]
