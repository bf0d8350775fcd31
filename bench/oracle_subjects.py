"""The 14 models of the trace `workload62` as the oracle's subjects, and windows of their traffic: recorded or drawn.

Recorded windows are those of all applications of a model together, scaled to production volume as the trace's recipe
says: each request so many times, its copies some seconds apart. Drawn ones have the model's own lengths at rates and
scales that vary more than a day does. Every draw comes from the generator that is handed in.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from janus_server.errors import BadConfig
from janus_server.sched.oracle_records import Promise, Subject
from janus_server.sched.roofline import ASCEND_910C, ModelShape, shards_needed

from .oracle_world import Requests, Window
from .traces import open_text

VOLUME: Final = 75.6
WINDOW_S: Final = 120.0
# A request of a recorded window is repeated, its copies up to this far from it, or up to the mean gap between requests
# of its application: at production volume a rare application is smooth, not seventy requests at once.
_JITTER_S: Final = 10.0
_DAY_S: Final = 86_400.0


class Recorded(NamedTuple):
    """A subject and all requests of a day for its model, by arrival, and how far copies of each [n] may stray."""

    subject: Subject
    requests: Requests
    jitter_s: npt.NDArray[np.float64]


def read(folder: Path) -> Mapping[str, Recorded]:
    """By name of the model, those in use."""
    try:
        with open_text(folder / "models.csv") as file:
            models = {row["llm"]: row for row in csv.DictReader(file)}
        with open_text(folder / "apps.csv") as file:
            apps = list(csv.DictReader(file))
        with open_text(folder / "requests.csv.gz") as file:
            rows = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.int64)
    except (KeyError, ValueError) as error:
        raise BadConfig(f"{folder}: not the trace workload62 ({error})") from None
    used: dict[str, list[int]] = {}
    for i, app in enumerate(apps):
        used.setdefault(app["llm"], []).append(i)
    return {
        name: Recorded(_subject(models[name], [apps[i] for i in members]), *_of_apps(rows, members))
        for name, members in sorted(used.items())
    }


def _of_apps(rows: npt.NDArray[np.int64], members: list[int]) -> tuple[Requests, npt.NDArray[np.float64]]:
    gap_s = _DAY_S / np.maximum(np.bincount(rows[:, 1]), 1)
    rows = rows[np.isin(rows[:, 1], members)]
    return Requests(rows[:, 0] / 1e3, rows[:, 2], rows[:, 3]), np.maximum(gap_s[rows[:, 1]], _JITTER_S)


def _subject(row: Mapping[str, str], apps: list[dict[str, str]]) -> Subject:
    """The strictest promise of its applications; decode steps paced at half of TPOT, as packing counts them."""
    model = shape_of(row)
    tpot_s = min(float(app["tpot_slo_ms"]) for app in apps) / 1e3
    return Subject(
        model=model, device=ASCEND_910C, shards=shards_needed(model, ASCEND_910C), pace_s=tpot_s / 2,
        promise=Promise(min(float(app["ttft_slo_s"]) for app in apps), tpot_s),
    )  # fmt: skip


def shape_of(row: Mapping[str, str]) -> ModelShape:
    """From a row of models.csv: bf16, and 8 bits from 100 billion parameters on."""
    layers, hidden = int(row["layers"]), int(row["hidden"])
    experts = int(row["experts"])
    sparse = layers - int(row["first_dense_layers"])
    routed = 3.0 * hidden * float(row["moe_intermediate"] or 0) * experts * sparse
    # Latent attention works in its 512 + 64 dimensions, for each head.
    width = 576 if row["attention"] == "mla" else int(row["head_dim"])
    return ModelShape(
        name=row["llm"], parameters=float(row["params_b"]) * 1e9, layers=layers, hidden=hidden,
        kv_bytes=float(row["kv_bytes_per_token_bf16"]), pair_flops=4.0 * layers * int(row["heads"]) * width,
        parameter_bytes=1.0 if float(row["params_b"]) > 100 else 2.0, expert_parameters=routed, experts=experts,
        experts_per_token=int(row["experts_per_token"]),
    )  # fmt: skip


def recorded_window(recorded: Recorded, draws: np.random.Generator) -> tuple[Requests, Window]:
    """A random window of the day at production volume, and what comes before and after it, from second 0 on."""
    warm_s = _warm_s(recorded.subject, float(recorded.requests.outputs.mean()))
    length_s, far_s = warm_s + WINDOW_S + 1.0, float(recorded.jitter_s.max())
    start_s = draws.uniform(far_s, _DAY_S - length_s - far_s)
    day = recorded.requests
    first, last = np.searchsorted(day.at_s, [start_s - far_s, start_s + length_s + far_s])
    copies = np.full(last - first, int(VOLUME)) + (draws.random(last - first) < VOLUME % 1.0)
    source = np.repeat(np.arange(first, last), copies)
    at_s = day.at_s[source] - start_s + draws.uniform(-1.0, 1.0, len(source)) * recorded.jitter_s[source]
    order = np.argsort(at_s, kind="stable")
    order = order[(at_s[order] >= 0.0) & (at_s[order] < length_s)]
    source = source[order]
    return Requests(at_s[order], day.inputs[source], day.outputs[source]), Window(warm_s, warm_s + WINDOW_S)


def drawn_window(recorded: Recorded, per_second: float, draws: np.random.Generator) -> tuple[Requests, Window]:
    """Requests at about per_second in all, in bursts, with the model's own lengths stretched by a factor."""
    scale_in, scale_out = np.exp(draws.uniform(-0.7, 0.7, 2)).tolist()
    day = recorded.requests
    warm_s = _warm_s(recorded.subject, float(day.outputs.mean()) * scale_out)
    length_s = warm_s + WINDOW_S + 1.0
    shape = 1.0 / draws.uniform(0.7, 2.0) ** 2
    count = int(per_second * length_s * 1.5) + 20
    at_s = np.cumsum(draws.gamma(shape, 1.0 / shape / per_second, count))
    at_s = at_s[at_s < length_s]
    inputs = day.inputs[draws.integers(0, len(day.inputs), len(at_s))] * scale_in
    outputs = day.outputs[draws.integers(0, len(day.outputs), len(at_s))] * scale_out
    sizes = (np.clip(inputs, 1, 32_768).astype(np.int64), np.clip(outputs, 1, 8192).astype(np.int64))
    return Requests(at_s, *sizes), Window(warm_s, warm_s + WINDOW_S)


def _warm_s(subject: Subject, output_tokens: float) -> float:
    """Long enough for as many to be at work as in the steady state."""
    return min(10.0 + 1.5 * output_tokens * subject.promise.tpot_s, 180.0)
