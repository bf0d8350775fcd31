"""Fits one model's GPs with gpytorch, in a process of its own: torch and gpytorch are imported here alone. A program.

The leader's shell starts it through `bounded` (limits, no pickle, one question a frame, JSON with arrays as base64);
a question is a FitRequest, the answer a Fitted that the journal keeps. It sees residuals of the prior and nothing of
models or devices. Never imported by the server: `oracle` evaluates in numpy.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Final, NamedTuple

import gpytorch  # type: ignore[import-untyped]
import msgspec
import numpy as np
import torch
from gpytorch.kernels import MaternKernel, ScaleKernel  # type: ignore[import-untyped]
from gpytorch.priors import LogNormalPrior  # type: ignore[import-untyped]

from janus_server.bounded_child import serve
from janus_server.sched.oracle_arrays import Array, pack, unpack
from janus_server.sched.oracle_gp import JITTER, matern
from janus_server.sched.oracle_records import Counts, FitRequest, Fitted, FittedGp, Hyper, Points

COLD_STEPS: Final = 60
WARM_STEPS: Final = 8
RATE: Final = 0.1
# Newton's steps towards the most probable log odds, before the hyperparameters are fitted and after.
_NEWTON: Final = 8
# Of what a prediction says, this part must come true within so many standard deviations.
_BAND: Final = 0.9
_BAND_SIGMAS: Final = 1.645
_MOST_DOUBT: Final = 9.0
# Log odds of one window are told apart up to here; beyond, a window of any size says only "all" or "none".
_MOST: Final = 9.0


class Belief(NamedTuple):
    """Medians of log-normal priors on hyperparameters, and how many factors of e they spread: 30 points do not
    determine ten hyperparameters, and length scales least of all."""

    length: float
    length_spread: float
    scale: float
    noise: float
    request_noise: float
    spread: float


DEMAND: Final = Belief(length=1.3, length_spread=0.4, scale=0.3, noise=0.003, request_noise=0.1, spread=0.8)
ATTAINMENT: Final = Belief(length=1.3, length_spread=0.4, scale=1.2, noise=0.1, request_noise=1e-4, spread=0.7)


def main(cpu_s: float, memory_bytes: int) -> None:
    torch.set_num_threads(1)
    answer(msgspec.to_builtins(_small()))  # what is imported late cannot be, later
    serve(answer, cpu_s, memory_bytes)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = msgspec.to_builtins(fit(msgspec.convert(question, FitRequest)))
    return reply


def fit(request: FitRequest) -> Fitted:
    """Each GP on its own; the same request gives the same numbers on the same machine."""
    start = time.process_time()
    starts: list[Hyper | None] = [*request.starts, *[None] * 4][:4]
    demand = tuple(_fit_points(points, starts[i]) for i, points in enumerate(request.demand))
    warm = starts[len(request.demand)]
    attainment = None if request.attainment is None else _fit_counts(request.attainment, warm)
    return Fitted(request.model, request.at_s, demand, attainment, time.process_time() - start)


def _fit_points(points: Points, start: Hyper | None) -> FittedGp:
    targets, requests, aged = (unpack(data) for data in (points.residuals, points.requests, points.aged))
    count = len(targets)
    inputs = unpack(points.inputs, 6)
    trained = _Trained(inputs, DEMAND, start)
    zeros = np.zeros(count)
    if count:
        trained.run(targets, zeros, requests, aged, WARM_STEPS if start else COLD_STEPS)
    hyper = trained.hyper()
    return _fitted(hyper, inputs, targets, _variances(hyper, zeros, requests, aged))


def _fit_counts(counts: Counts, start: Hyper | None) -> FittedGp:
    """Laplace's approximation: binomial counts become pseudo-targets with variances, where the posterior is highest.

    A window of n requests of which all were on time says little where that was expected, however the odds of n+½ to ½
    would look: hence counts, not their empirical log odds.
    """
    inputs = unpack(counts.inputs, 7)
    prior, tries, hits, aged = (unpack(d) for d in (counts.prior, counts.requests, counts.on_time, counts.aged))
    trained = _Trained(inputs, ATTAINMENT, start)
    nothing = np.ones(len(tries))
    latent = np.zeros(len(tries))
    for steps in (WARM_STEPS,) if start else (COLD_STEPS // 2, COLD_STEPS // 2):
        latent = trained.mode(latent, prior, tries, hits, aged)
        targets, noise = _pseudo(latent, prior, tries, hits)
        trained.run(targets, noise, nothing, aged, steps)
    hyper = trained.hyper()
    latent = trained.mode(latent, prior, tries, hits, aged)
    targets, noise = _pseudo(latent, prior, tries, hits)
    return _fitted(hyper, inputs, targets, _variances(hyper, noise, nothing, aged))


def _fitted(hyper: Hyper, inputs: Array, targets: Array, noise: Array) -> FittedGp:
    """With the doubt that its own points cast on it.

    Points that determined hyperparameters tell too little of the spread: as around a fitted line, n less what was
    fitted. And traffic has heavier tails than a Gaussian: nine points in ten must lie inside the band that the others
    predict for them.
    """
    count, free = len(targets), len(hyper.lengths) + 2
    doubt = max(count, 2 * free) / (max(count, 2 * free) - free)
    rank = math.ceil(_BAND * (count + 1))
    if count and rank <= count:
        scaled = inputs / np.array(hyper.lengths)
        inverse = _solve(matern(scaled, scaled, hyper.scale) + np.diag(noise + JITTER * hyper.scale**2), np.eye(count))
        left_out = np.abs(inverse @ targets) / np.sqrt(np.diag(inverse))
        doubt = max(doubt, (float(np.sort(left_out)[rank - 1]) / _BAND_SIGMAS) ** 2)
    return FittedGp(
        msgspec.structs.replace(hyper, doubt=min(doubt, _MOST_DOUBT)), pack(inputs), pack(targets), pack(noise)
    )


def _solve(matrix: Array, right: Array) -> Array:
    """By torch, which was told to use one thread: numpy's would keep every processor busy."""
    factor = torch.linalg.cholesky(torch.from_numpy(matrix))
    solved: Array = torch.cholesky_solve(torch.from_numpy(right), factor).numpy()
    return solved


def _pseudo(latent: Array, prior: Array, tries: Array, hits: Array) -> tuple[Array, Array]:
    """Targets and variances that give a Gaussian the gradient and curvature of the binomial at `latent`."""
    chance = 1.0 / (1.0 + np.exp(-np.clip(prior + latent, -_MOST, _MOST)))
    weight = np.maximum(tries * chance * (1.0 - chance), 1e-6)
    return latent + (hits - tries * chance) / weight, 1.0 / weight


def _variances(hyper: Hyper, known: Array, requests: Array, aged: Array) -> Array:
    return np.asarray(known + hyper.noise + hyper.request_noise / requests + aged * hyper.scale**2)


class _Trained:
    """A kernel and the noise around it while they are being fitted: the most probable under priors on both."""

    def __init__(self, inputs: Array, belief: Belief, start: Hyper | None) -> None:
        size = inputs.shape[1]
        self._inputs = torch.tensor(inputs, dtype=torch.float64)
        self._belief = belief
        self._matern = MaternKernel(nu=2.5, ard_num_dims=size)
        self._kernel = ScaleKernel(self._matern).double()
        begin = start or Hyper((belief.length,) * size, belief.scale, belief.noise, belief.request_noise)
        self._matern.lengthscale = torch.tensor(begin.lengths, dtype=torch.float64)
        self._kernel.outputscale = torch.tensor(begin.scale**2, dtype=torch.float64)
        log = [math.log(begin.noise), math.log(begin.request_noise)]
        self._log_noise = torch.tensor(log, dtype=torch.float64, requires_grad=True)

    def run(self, targets: Array, known: Array, requests: Array, aged: Array, steps: int) -> None:
        """Climb for `steps`; known, requests and aged as in `_variances`."""
        y, extra, few, old = (torch.tensor(a, dtype=torch.float64) for a in (targets, known, 1.0 / requests, aged))
        optimiser = torch.optim.Adam([*self._kernel.parameters(), self._log_noise], lr=RATE)
        for _ in range(steps):
            optimiser.zero_grad()
            noise, request_noise = self._log_noise.exp()
            variance = self._kernel.outputscale
            diagonal = extra + noise + request_noise * few + (old + JITTER) * variance
            covariance = self._kernel(self._inputs).add_diagonal(diagonal)
            evidence = gpytorch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
            loss = -evidence - self._log_prior()
            if not bool(torch.isfinite(loss)):
                return  # what has been found so far stands
            loss.backward()
            optimiser.step()

    def _log_prior(self) -> torch.Tensor:
        b = self._belief

        def near(values: torch.Tensor, median: float, spread: float = b.spread) -> torch.Tensor:
            # Of the logarithm: a log-normal's own density would pull towards its mode.
            density: torch.Tensor = LogNormalPrior(math.log(median), spread).log_prob(values).sum()
            return density + values.log().sum()

        noise, request_noise = self._log_noise.exp()
        return (
            near(self._matern.lengthscale, b.length, b.length_spread)
            + near(self._kernel.outputscale.sqrt(), b.scale)
            + near(noise.sqrt(), math.sqrt(b.noise))
            + near(request_noise.sqrt(), math.sqrt(b.request_noise))
        )

    def mode(self, latent: Array, prior: Array, tries: Array, hits: Array, aged: Array) -> Array:
        """Newton's method for the most probable errors [n] of the log odds, noise included, from `latent` on."""
        hyper = self.hyper()
        with torch.no_grad():
            covariance = self._kernel(self._inputs).to_dense().numpy().copy()
        extra = _variances(hyper, np.zeros(len(tries)), np.ones(len(tries)), aged) + JITTER * hyper.scale**2
        covariance[np.diag_indices(len(covariance))] += extra
        for _ in range(_NEWTON):
            targets, noise = _pseudo(latent, prior, tries, hits)
            step = covariance @ _solve(covariance + np.diag(noise), targets[:, None])[:, 0] - latent
            # Far off, a full step can overshoot into where the binomial is flat.
            latent = latent + np.clip(step, -2.0, 2.0)
            if float(np.abs(step).max(initial=0.0)) < 1e-3:
                break
        return latent

    def hyper(self) -> Hyper:
        with torch.no_grad():
            noise, request_noise = self._log_noise.exp().tolist()
            lengths = tuple(self._matern.lengthscale.flatten().tolist())
            scale = float(self._kernel.outputscale) ** 0.5
        return Hyper(lengths, scale, noise, request_noise)


def _small() -> FitRequest:
    draws = np.random.default_rng(0)
    ones = pack(np.ones(8))
    points = Points(pack(draws.normal(size=(8, 6))), pack(draws.normal(size=8)), ones, pack(np.zeros(8)))
    counts = Counts(pack(draws.normal(size=(8, 7))), ones, pack(np.full(8, 3.0)), ones, pack(np.zeros(8)))
    return FitRequest("", 0.0, (points,), counts)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
