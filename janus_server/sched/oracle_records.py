"""Records of the oracle: what is observed of a model, what a fit is asked for, and what it answers. All frozen.

They cross a process (`oracle_fit` runs in one of its own) and the journal: arrays travel as the bytes of little-endian
float64 (`oracle_arrays`), so that what is read back gives the very same numbers; numpy is not imported here. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec

from janus_server.sched.shapes import DeviceShape, ModelShape

OUTPUTS: Final = ("HBM", "compute", "bandwidth")
"""The capacity GPs, in this order: each a share of one device, for one shard of one replica."""


class Features(msgspec.Struct, frozen=True):
    """A model's traffic over a window: tokens (input and output) and requests a second, and lengths in tokens."""

    token_rate: float
    request_rate: float
    input_mean: float
    input_variance: float
    output_mean: float
    output_variance: float


class Promise(msgspec.Struct, frozen=True):
    """What a request must keep to attain its SLO. Where applications of one model differ, the strictest's."""

    ttft_s: float
    tpot_s: float


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it is served: what the prior needs to know of it before anything has been observed.

    pace_s: between the starts of its decode steps on a device that it shares, where it takes turns no oftener than its
    TPOT needs; 0 where it steps as fast as it can.
    """

    model: ModelShape
    device: DeviceShape
    promise: Promise
    shards: int = 1
    pace_s: float = 0.0


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a model with its number of replicas unchanged.

    features are of all its replicas together; the shares are means over replicas and shards (HBM: of the most that the
    window saw), None where nothing measured them. requests ended in the window, on_time of them attained their SLO.
    """

    at_s: float
    features: Features
    replicas: int
    requests: int
    on_time: int
    hbm: float | None = None
    compute: float | None = None
    bandwidth: float | None = None


class Hyper(msgspec.Struct, frozen=True):
    """Of one GP: a length scale for each input, the standard deviation of what it models (the prior's error), and the
    variance of an observation: noise, and what is added for a window of one request (a hundredth of it with 100).

    doubt: what few points leave open about the above, as a factor on every variance of a prediction.
    """

    lengths: tuple[float, ...]
    scale: float
    noise: float
    request_noise: float
    doubt: float = 1.0


class Points(msgspec.Struct, frozen=True):
    """What a capacity GP is fitted to: inputs [n, d], residuals [n] of log shares over the prior's, requests [n] of the
    windows, and variances [n] that age has added, in units of scale².
    """

    inputs: bytes
    residuals: bytes
    requests: bytes
    aged: bytes


class Counts(msgspec.Struct, frozen=True):
    """What an elasticity GP is fitted to: inputs [n, d], the prior's log odds [n] of attaining, and per window the
    requests [n] and those on time [n]; aged as above.
    """

    inputs: bytes
    prior: bytes
    requests: bytes
    on_time: bytes
    aged: bytes


class FitRequest(msgspec.Struct, frozen=True):
    """Fit one model: its capacity GPs in the order of OUTPUTS and its elasticity GP, as far as there is data.

    starts are the hyperparameters of the last fit, if any: four, in the order of demand and then attainment.
    """

    model: str
    at_s: float
    demand: tuple[Points, ...]
    attainment: Counts | None
    starts: tuple[Hyper, ...] = ()


class FittedGp(msgspec.Struct, frozen=True):
    """A GP with zero mean: inputs [n, d], targets [n] and the variance [n] of each. The posterior follows from them."""

    hyper: Hyper
    inputs: bytes
    targets: bytes
    noise: bytes


class Fitted(msgspec.Struct, frozen=True, tag=True):
    """What came of a FitRequest. took_s is the processor time. The Brain hears it as an event."""

    model: str
    at_s: float
    demand: tuple[FittedGp, ...]
    attainment: FittedGp | None
    took_s: float


class Learnt(msgspec.Struct, frozen=True, kw_only=True):
    """All that an oracle knows of one model. observations are in the order in which they came, of `added` in all;
    asked_* are of the last fit that was asked for, `fitted` the last one that came back.
    """

    name: str
    subject: Subject
    observations: tuple[Observation, ...] = ()
    added: int = 0
    asked_added: int = 0
    asked_s: float | None = None
    fitted: Fitted | None = None
