"""The penalties by their definition, over a whole prompt and output at once, and a history that grew token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from janus_server.sched.seen import Seen, distinct
from janus_server.types import History, Sampling

_LARGEST = float(np.finfo(np.float32).max)


def history_of(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> History:
    """What a choice looks back on after it drew `output`."""
    seen = Seen(distinct(prompt))
    for token in output:
        seen.add(token)
    return seen.history()


def same_history(history: History, prompt: Sequence[int], output: Sequence[int]) -> bool:
    """Whether a history says of each token what the texts themselves say."""
    drawn = dict(zip(history.drawn.tolist(), history.counts.tolist(), strict=True))
    fresh = history.fresh.tolist()
    return (
        drawn == {token: list(output).count(token) for token in output}
        and len(history.drawn) == len(drawn)
        and history.prompt.tolist() == sorted(set(prompt))
        and sorted(fresh) == sorted(set(output) - set(prompt))
    )


def penalised(raw: np.ndarray, s: Sampling, prompt: tuple[int, ...], output: tuple[int, ...]) -> np.ndarray:
    """Logits [vocab] f32 after bias and penalties."""
    logits = raw.astype(np.float32, copy=True)
    for token, bias in s.logit_bias:
        logits[token] += bias
    seen = np.unique(np.asarray(prompt + output, dtype=np.int64))
    if s.repetition_penalty != 1.0:
        known = logits[seen]
        with np.errstate(over="ignore"):
            known = np.where(known > 0, known / s.repetition_penalty, known * s.repetition_penalty)
        logits[seen] = np.clip(known, -_LARGEST, _LARGEST)
    if output:
        ids, counts = np.unique(np.asarray(output, dtype=np.int64), return_counts=True)
        logits[ids] -= (s.frequency_penalty * counts + s.presence_penalty).astype(np.float32)
    return logits
