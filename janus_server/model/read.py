"""What is read of a step's rows beside the next token: log probabilities of the prompt, and hidden states pooled.

`runner` calls it after the forward pass. Rows are looked at a few at a time, so that no array of a whole step's logits
exists. What comes out depends on the rows alone, never on how a prompt was cut into steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from janus_server.model.decoder import Decoder
from janus_server.model.sample import logprob_of
from janus_server.types import Fault, PoolSpec, Reading, ScoreSpec, TokenLogprob


def score(decoder: Decoder, row: int, spec: ScoreSpec) -> Reading:
    """The log probability of each target after its row, the first of which is `row` of the step."""
    scores: list[TokenLogprob] = []
    for first, stop in _slices(row, row + len(spec.targets), decoder.read_rows):
        logits = decoder.logits_of(first, stop)
        if not np.isfinite(logits.max(axis=1)).all():
            return Reading(fault=Fault.NOT_FINITE)
        targets = spec.targets[first - row : stop - row]
        scores += [logprob_of(raw, token, spec.top) for raw, token in zip(logits, targets, strict=True)]
    return Reading(tuple(scores))


def pool(decoder: Decoder, first: int, stop: int, spec: PoolSpec) -> Reading:
    """Add rows first … stop-1 of the step to the sums: in float64, one row after the other, in the prompt's order."""
    sums = np.zeros(decoder.spec.hidden) if spec.sums is None else spec.sums.copy()
    with np.errstate(invalid="ignore"):
        for start, end in _slices(first, stop, decoder.read_rows):
            for hidden in decoder.hidden_of(start, end):
                sums += hidden
    if not np.isfinite(sums).all():
        return Reading(fault=Fault.NOT_FINITE)
    if spec.mean_of is None:
        return Reading(sums=sums)
    return Reading(embedding=tuple((sums / spec.mean_of).astype(np.float32).tolist()))


def _slices(first: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(first, stop, most):
        yield start, min(start + most, stop)
