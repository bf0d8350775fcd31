"""What 62 applications need of devices, every 30 s of a day: what `packing` places and `packing_exact` checks.

Read from the trace `workload62` (its folder is given), scaled to production volume, and turned into shares of the
device that the packing claims were measured on by a roofline. Three shapes of the same day, since shape decides how
hard it is. Nothing here is random.
"""

from __future__ import annotations

import csv
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from janus_server.errors import BadConfig
from janus_server.sched.demand import Demand

from .traces import open_text

STEPS: Final = 2880
STEP_MS: Final = 30_000
# Ascend 910C die: 58 GB usable for models, half of 376 TFLOPS, four fifths of 1.49 TB/s.
_HBM_BYTES: Final = 58e9
_FLOPS: Final = 0.5 * 376e12
_BANDWIDTH: Final = 0.8 * 1.49e12
# The trace is a sample of 603,000 of a day's 45.6 million requests.
VOLUME: Final = 75.6
# Rates are means over ten minutes; a model without a request in them sleeps and needs nothing.
_WINDOW_STEPS: Final = 20
# A shard's weights take three quarters of a device at most.
_WEIGHT_SHARE: Final = 0.75
_ACTIVATION_BYTES: Final = 1e9
# What a move costs: the fork's fixed part and its bytes at 65 GB/s, on the source's and the target's account.
_FORK_S, _FORK_BYTES_S = 0.283, 65e9


class Shape(enum.Enum):
    """PLAIN: each application is one instance on one device, weights divided by its tensor parallel degree. SHARDED:
    it has as many shards as that degree, each on its own device. EVEN: like PLAIN, with HBM and bandwidth scaled down
    until the day needs as much of them as of compute, which makes packing a problem of all three dimensions."""

    PLAIN = "plain"
    SHARDED = "sharded"
    EVEN = "even"


class Day(NamedTuple):
    """share [steps, apps, 3] of a device for a shard, 0 where the model sleeps or an instance would not be enough for
    it (it belongs to the elastic pool then); shards [apps]; move_s [apps]."""

    share: npt.NDArray[np.float64]
    shards: Sequence[int]
    move_s: Sequence[float]

    def demands(self, step: int) -> list[Demand]:
        needed = np.flatnonzero(self.share[step, :, 0]).tolist()
        return [self._demand(i, *self.share[step, i].tolist()) for i in needed]

    def _demand(self, app: int, hbm: float, compute: float, bandwidth: float) -> Demand:
        return Demand(
            model=f"app{app:02d}", hbm=hbm, compute=compute, bandwidth=bandwidth, shards=self.shards[app],
            move_s=self.move_s[app],
        )  # fmt: skip


def read_day(folder: Path, shape: Shape, volume: float = VOLUME) -> Day:
    """The day in the given shape."""
    try:
        with open_text(folder / "models.csv") as file:
            models = {row["llm"]: row for row in csv.DictReader(file)}
        with open_text(folder / "apps.csv") as file:
            apps = list(csv.DictReader(file))
        with open_text(folder / "requests.csv.gz") as file:
            rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    except (KeyError, ValueError) as error:
        raise BadConfig(f"{folder}: not the trace workload62 ({error})") from None
    count = len(apps)
    rates = [_rates(rows, weight, count) * volume for weight in (np.ones(len(rows)), rows[:, 2], rows[:, 3])]
    share = np.zeros((STEPS, count, 3))
    shards, move_s = [], []
    for i, app in enumerate(apps):
        weights = _weight_bytes(models[app["llm"]])
        parts = 1
        while weights / parts > _WEIGHT_SHARE * _HBM_BYTES:
            parts *= 2
        tpot_s = float(app["tpot_slo_ms"]) / 1e3
        share[:, i] = _roofline(models[app["llm"]], [rate[:, i] for rate in rates], tpot_s, parts)
        shards.append(parts if shape is Shape.SHARDED else 1)
        move_s.append(_FORK_S + weights / parts / _FORK_BYTES_S)
    if shape is Shape.EVEN:
        total = share[share.max(2) <= 1.0].sum(0)
        share *= total.min() / total
    share[share.max(2) > 1.0] = 0.0
    return Day(share, shards, move_s)


def _weight_bytes(model: dict[str, str]) -> float:
    """bf16, and 8 bits from 100 billion parameters on."""
    params_b = float(model["params_b"])
    return params_b * 1e9 * (1 if params_b > 100 else 2)


def _rates(rows: npt.NDArray[np.int64], weight: npt.NDArray[np.generic], apps: int) -> npt.NDArray[np.float64]:
    """[steps, apps] weight a second, the mean over the last ten minutes."""
    at = rows[:, 0] // STEP_MS * apps + rows[:, 1]
    total = np.cumsum(np.bincount(at, weights=weight, minlength=STEPS * apps).reshape(STEPS, apps), axis=0)
    window = total.copy()
    window[_WINDOW_STEPS:] -= total[:-_WINDOW_STEPS]
    steps = np.minimum(np.arange(1, STEPS + 1), _WINDOW_STEPS)[:, None]
    return window / (steps * STEP_MS / 1e3)


def _roofline(
    model: dict[str, str], rates: Sequence[npt.NDArray[np.float64]], tpot_s: float, parts: int
) -> npt.NDArray[np.float64]:
    """[steps, 3] share of a device for one of `parts` shards; rates are requests, input and output tokens a second.

    Decoding runs at half of TPOT, so that output rate times that is the batch; a step reads the active weights once.
    """
    requests, tokens_in, tokens_out = rates
    active = float(model["active_params_b"]) * 1e9
    read = active * _weight_bytes(model) / (float(model["params_b"]) * 1e9)
    context = (tokens_in + tokens_out / 2) / np.maximum(requests, 1e-9)
    kv = context * float(model["kv_bytes_per_token_bf16"])
    batch = tokens_out * tpot_s / 2
    hbm = (_weight_bytes(model) / parts + _ACTIVATION_BYTES + np.maximum(batch, 1.0) * kv / parts) / _HBM_BYTES
    compute = 2 * active * (tokens_in + tokens_out) / parts / _FLOPS
    reads = np.minimum(tokens_out, 2 / tpot_s) + requests
    bandwidth = (reads * read + tokens_out * kv) / parts / _BANDWIDTH
    return np.stack((hbm, compute, bandwidth), axis=-1) * (requests > 0)[:, None]
