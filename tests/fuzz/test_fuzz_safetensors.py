"""Hugging Face folders whose safetensors header or config lies: `BadModel`, or the weights that the file holds."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from checkpoint_cases import CONFIG, safetensors_bytes, safetensors_header, write_folder
from harness import EXTREMES, fuzz, scribble
from loading import Loaded, check_weights, outcome

from janus_server.errors import BadModel


@dataclasses.dataclass(frozen=True)
class Case:
    raw: bytes
    config: bytes
    untouched: bool = False


HEADER, DATA = safetensors_header()
HONEST = Case(safetensors_bytes(HEADER, DATA), json.dumps(CONFIG).encode(), True)
ODD: tuple[Any, ...] = (
    None, True, False, -1, 1.5, "", "F32", "F16", "BF16", "I8", [], {}, [1], [[32]], [-1, 32], [1 << 62, 1 << 62],
    [0], [1] * 9, "x" * 500, "\u2028", [32.0], [True, 32], ["a"], {"a": 1}, *EXTREMES,
)  # fmt: skip


def make(rng: random.Random) -> Case:
    header, data, config = copy.deepcopy(HEADER), DATA, dict(CONFIG)
    kind = rng.random()
    if kind < 0.02:
        return HONEST
    if kind < 0.30:
        span = 8 + int.from_bytes(HONEST.raw[:8], "little")
        return Case(scribble(rng, HONEST.raw, span), HONEST.config)
    if kind < 0.40:
        return Case(scribble(rng, HONEST.raw), HONEST.config)
    if kind < 0.70:
        for _ in range(rng.choice((1, 1, 2, 3))):
            _change(rng, header)
        data = rng.choice((data, data, data[: rng.randrange(len(data))], data + b"\0" * rng.randrange(1, 99)))
        return Case(safetensors_bytes(header, data), HONEST.config)
    if kind < 0.92:
        for _ in range(rng.choice((1, 1, 2, 3))):
            config[rng.choice((*config, "rope_scaling", "quantization_config", "sliding_window", "hidden_act",
                               "attention_bias", "mlp_bias", "auto_map",
                               "use_sliding_window"))] = rng.choice(ODD)  # fmt: skip
        return Case(HONEST.raw, json.dumps(config).encode())
    if kind < 0.96:
        return Case(HONEST.raw, scribble(rng, HONEST.config))
    return Case(_odd_text(rng), HONEST.config)


def _change(rng: random.Random, header: dict[str, Any]) -> None:
    name = rng.choice(list(header))
    match rng.randrange(6):
        case 0:
            del header[name]
        case 1:
            header[rng.choice(("x", "", "\x00", "__metadata__", name + "x", "n" * 5000))] = header.pop(name)
        case 2:
            header[name] = rng.choice(ODD)
        case 3:
            other = rng.choice(list(header))
            header[name], header[other] = header[other], header[name]
        case _:
            if isinstance(header[name], dict) and header[name]:
                field = rng.choice(list(header[name]))
                value = header[name][field]
                if isinstance(value, list) and value and rng.random() < 0.6:
                    value[rng.randrange(len(value))] = rng.choice((*EXTREMES, -1, value[0], None, 32, 64))
                else:
                    header[name][field] = rng.choice(ODD)


def _odd_text(rng: random.Random) -> bytes:
    text = rng.choice((
        b"", b"{}", b"[]", b"null", b"[" * 50_000, b'{"a":' * 50_000, b'{"a": 1' + b"0" * 10_000 + b"}", b'{"a":NaN}',
        b'{"\xff":1}', b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}', b"{" + b" " * 100_000 + b"}",
    ))  # fmt: skip
    return safetensors_bytes(text, rng.choice((b"", bytes(4), DATA)))


def test_folders_that_lie_are_refused_or_hold_what_was_loaded(tmp_path: Path) -> None:
    def check(case: Case) -> None:
        found = outcome(write_folder(tmp_path, case.raw, case.config))
        if isinstance(found, Loaded):
            check_weights(found)
        assert not case.untouched or isinstance(found, Loaded)

    fuzz("safetensors", 1200, make, check)


def test_the_honest_folder_loads_and_a_lie_is_found(tmp_path: Path) -> None:
    assert isinstance(outcome(write_folder(tmp_path, HONEST.raw, HONEST.config)), Loaded)
    assert isinstance(outcome(write_folder(tmp_path, HONEST.raw[:-1], HONEST.config)), BadModel)
    loaded = outcome(write_folder(tmp_path, HONEST.raw, HONEST.config))
    assert isinstance(loaded, Loaded)
    loaded.weights.embed.handle[3, 5] += 1.0
    with pytest.raises(AssertionError):
        check_weights(loaded)
