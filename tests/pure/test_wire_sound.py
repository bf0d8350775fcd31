"""Requests from other nodes: what the front writes passes, and numbers that could not be do not."""

from __future__ import annotations

import math

import msgspec
import pytest

from janus_server.types import Grammar, GrammarKind, Promise, Request, Sampling
from janus_server.wire.frames import STREAM_ASKS, STREAM_MOST_BYTES, Known, Run, read, write
from janus_server.wire.sound import sound

REQUEST = Request(
    id="r", model="m", prompt=(1, 2, 3), max_tokens=9, n=3, stop=("\n",), stop_ids=(2,), promise=Promise(0.5, None),
    sampling=Sampling(seed=5, logit_bias=((3, -1.5),), logprobs=0), grammar=Grammar(GrammarKind.JSON_OBJECT),
)  # fmt: skip
RUN = Run(stream=1, id="r", call="r", upto=8, request=REQUEST, known=(Known(0, (1, 2)), Known(2, ())), ended=(1,))


def test_what_a_front_writes_is_sound_and_comes_over_the_wire_as_it_was() -> None:
    assert sound(RUN)
    assert read(write(RUN), STREAM_ASKS, STREAM_MOST_BYTES) == RUN
    assert RUN.known[0].position == 2
    greedy = msgspec.structs.replace(REQUEST, sampling=Sampling(temperature=0.0), promise=None, max_tokens=0)
    assert sound(msgspec.structs.replace(RUN, request=greedy, known=(), ended=()))


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": ()}, {"prompt": (-1,)}, {"prompt": (1 << 31,)}, {"n": 0}, {"n": 10**9}, {"max_tokens": -1},
        {"min_tokens": -1}, {"id": ""}, {"model": "m" * 600}, {"stop": ("",)}, {"stop_ids": (-1,)},
        {"prompt_logprobs": -1}, {"prompt_logprobs": 10**6}, {"priority": 1 << 40}, {"promise": Promise(math.nan)},
        {"promise": Promise(0.0)}, {"promise": Promise(None, None, 2.0)},
    ],
    ids=str,
)  # fmt: skip
def test_requests_that_could_not_be_are_not_sound(change: dict[str, object]) -> None:
    assert not sound(msgspec.structs.replace(RUN, request=msgspec.structs.replace(REQUEST, **change)))


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": math.nan}, {"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 2.0}, {"min_p": -0.1},
        {"repetition_penalty": 0.0}, {"presence_penalty": math.inf}, {"top_k": -1}, {"seed": 1 << 63}, {"logprobs": -1},
        {"logit_bias": ((1, math.nan),)}, {"logit_bias": ((-1, 0.0),)},
    ],
    ids=str,
)  # fmt: skip
def test_nor_are_samplings(change: dict[str, object]) -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, **change)
    assert not sound(msgspec.structs.replace(RUN, request=msgspec.structs.replace(REQUEST, sampling=sampling)))


@pytest.mark.parametrize(
    ("known", "ended"),
    [
        ((Known(3, ()),), ()),
        ((Known(0, ()), Known(0, (1,))), ()),
        ((), (1, 1)),
        ((), (0, 1, 2)),  # nothing is left to run
        ((), (7,)),
        ((Known(0, tuple(range(10))),), ()),  # more than it may say
    ],
)
def test_nor_is_progress_of_choices_that_there_are_not(known: tuple[Known, ...], ended: tuple[int, ...]) -> None:
    assert not sound(msgspec.structs.replace(RUN, known=known, ended=ended))
