"""Gaussian processes in numpy: the posterior of one that `oracle_fit` fitted, and the projection to what must not fall.

`oracle` evaluates them many times a second, so everything that depends on the data alone is computed once. Matérn 5/2
with a length scale for each input: demand bends at saturation, and an infinitely smooth kernel would be too sure
beyond what it has seen. Zero mean: far from all data a posterior is the prior again. Pure; fits nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from janus_server.sched.oracle_arrays import Array, unpack
from janus_server.sched.oracle_records import FittedGp

_ROOT5 = math.sqrt(5.0)
# Of the prior's variance, so that two equal points do not make the matrix singular.
JITTER = 1e-6


class Normal(NamedTuple):
    """Means and standard deviations, arrays of one shape."""

    mean: Array
    sigma: Array


class Posterior:
    """One GP given its points: what it says about the latent value, without the noise of another observation."""

    def __init__(self, fitted: FittedGp) -> None:
        self.hyper = fitted.hyper
        self._fitted = fitted
        self._solved: _Solved | None = None

    def at(self, inputs: Array) -> Normal:
        """inputs [k, d]; mean and sigma [k]. The first call takes milliseconds: fits come in one at a time, and what
        nobody asks about costs nothing."""
        solved = self._solved = self._solved or _solve(self._fitted)
        asked = inputs / np.array(self.hyper.lengths)
        squares = (asked**2).sum(1)[:, None] + solved.squares - 2.0 * (asked @ solved.scaled.T)
        cross = _of_squares(squares, self.hyper.scale)
        left = self.hyper.scale**2 - ((cross @ solved.factor) ** 2).sum(1)
        return Normal(cross @ solved.weights, np.sqrt(np.maximum(left, 0.0)))


class _Solved(NamedTuple):
    """scaled inputs [n, d] and their squares [n]; the inverse of the Cholesky factor, transposed [n, n]; weights [n].

    With the factor the variance loses a sum of squares, which rounding cannot turn negative as the inverse of the whole
    matrix can.
    """

    scaled: Array
    squares: Array
    factor: Array
    weights: Array


def _solve(fitted: FittedGp) -> _Solved:
    hyper = fitted.hyper
    scaled = unpack(fitted.inputs, len(hyper.lengths)) / np.array(hyper.lengths)
    covariance = matern(scaled, scaled, hyper.scale)
    covariance[np.diag_indices(len(covariance))] += unpack(fitted.noise) + JITTER * hyper.scale**2
    factor = np.ascontiguousarray(np.linalg.inv(np.linalg.cholesky(covariance)).T)
    return _Solved(scaled, (scaled**2).sum(1), factor, factor @ (factor.T @ unpack(fitted.targets)))


def matern(a: Array, b: Array, scale: float) -> Array:
    """Covariance [n, m] of inputs [n, d] and [m, d] that are divided by their length scales."""
    return _of_squares((a**2).sum(1)[:, None] + (b**2).sum(1) - 2.0 * (a @ b.T), scale)


def _of_squares(squares: Array, scale: float) -> Array:
    """From squared distances; rounding may have made those of equal points negative."""
    distance = _ROOT5 * np.sqrt(np.maximum(squares, 0.0))
    return np.asarray(scale**2 * (1.0 + distance + distance**2 / 3.0) * np.exp(-distance))


def rising(values: Array, weights: Array) -> Array:
    """The nearest rows, by weighted squares, that never fall: isotonic regression of each row of [m, k].

    By its minimax form: the k-th is the most, over starts up to k, of the least mean over ends from k on.
    """
    if bool((values[:, 1:] >= values[:, :-1]).all()):
        return values
    count = values.shape[1]
    sums = np.zeros((len(values), count + 1))
    masses = np.zeros_like(sums)
    np.cumsum(values * weights, axis=1, out=sums[:, 1:])
    np.cumsum(weights, axis=1, out=masses[:, 1:])
    start, end = np.arange(count)[:, None], np.arange(1, count + 1)
    inside = end > start
    mass = np.where(inside, masses[:, None, 1:] - masses[:, :count, None], 1.0)
    mean = np.where(inside, (sums[:, None, 1:] - sums[:, :count, None]) / mass, np.inf)
    least = np.minimum.accumulate(mean[:, :, ::-1], axis=2)[:, :, ::-1]
    # A start after k must not count.
    least = np.where(inside, least, -np.inf)
    return np.asarray(least.max(axis=1))


def running_most(values: Array) -> Array:
    """A lower bound at few replicas holds with more of them too: rows of [m, k] that never fall."""
    return np.asarray(np.maximum.accumulate(values, axis=1))
