"""The body, the call and the answer of /v1/embeddings."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from janus_server import types
from janus_server.api import embeddings
from janus_server.api.bodies import Limits
from janus_server.api.embeddings import EmbeddingForm, EmbeddingReply, form_of, inputs_of, parse_embedding
from janus_server.api.plan import Call, Kind, Label, Target
from janus_server.errors import Refused
from janus_server.types import Delta, FinishReason, Pooling

LIMITS = Limits()
TARGET = Target("m", 10, 300, (257,), types.Sampling(), hidden=4)
LABEL = Label("embd-1", 1_700_000_000, 42)


def body(**fields: Any) -> embeddings.EmbeddingBody:
    return parse_embedding(json.dumps({"model": "m", "input": "hi", **fields}).encode(), LIMITS)


def planned(prompts: list[list[int]], limits: Limits = LIMITS, **fields: Any) -> Call:
    return embeddings.plan_embeddings(body(**{"input": prompts, **fields}), prompts, TARGET, limits, LABEL)


def answer(call: Call, vectors: list[tuple[float, ...]], form: EmbeddingForm) -> dict[str, Any]:
    reply = EmbeddingReply(form, call, None)  # type: ignore[arg-type]
    for prompt, vector in reversed(list(enumerate(vectors))):
        reply.add(prompt, Delta(0, finish=FinishReason.STOP, embedding=vector))
    return json.loads(reply.body())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1, 2], [3]], ([1, 2], [3])),
    ],
)
def test_inputs_come_in_four_forms(given: Any, expected: tuple[Any, ...]) -> None:
    assert inputs_of(body(input=given)) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [1, [2]]}, "input"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"model": ""}, "model"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        body(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_call() -> None:
    call = planned([[1, 2], [3]], pooling="last")
    assert (call.kind, call.n, call.prompt_tokens, call.wordy) == (Kind.EMBEDDING, 1, 3, True)
    assert [(one.id, one.prompt, one.max_tokens, one.pooling) for one in call.requests] == [
        ("embd-1-0", (1, 2), 0, Pooling.LAST),
        ("embd-1-1", (3,), 0, Pooling.LAST),
    ]
    assert planned([[1]]).requests[0].pooling is Pooling.MEAN
    assert planned([[1]], dimensions=4).requests == planned([[1]]).requests


@pytest.mark.parametrize(
    ("prompts", "limits", "fields", "param", "code"),
    [
        ([[1] * 11], LIMITS, {}, "input", "context_length_exceeded"),
        ([[1], [300]], LIMITS, {}, "input", "invalid_value"),
        ([[-1]], LIMITS, {}, "input", "invalid_value"),
        ([[1]], LIMITS, {"dimensions": 3}, "dimensions", "invalid_value"),
        ([[1], [2], [3]], Limits(embedding_values=11), {}, "input", "invalid_value"),
        ([[1] * 5, [2] * 4], Limits(total_tokens=8), {}, "input", "invalid_value"),
    ],
)
def test_what_the_model_cannot_take(
    prompts: list[list[int]], limits: Limits, fields: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(Refused) as caught:
        planned(prompts, limits, **fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_a_prompt_that_fills_the_context_is_fine() -> None:
    assert len(planned([[1] * 10]).requests[0].prompt) == 10


def test_numbers_have_unit_length_unless_asked_otherwise() -> None:
    call = planned([[1, 2], [3]])
    vectors = [(3.0, 0.0, 4.0, 0.0), (0.0, 0.0, 0.0, 0.0)]
    found = answer(call, vectors, form_of(body()))
    assert found["object"] == "list" and found["model"] == "m"
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [one["index"] for one in found["data"]] == [0, 1]
    assert found["data"][0]["embedding"] == pytest.approx([0.6, 0.0, 0.8, 0.0])
    assert found["data"][1]["embedding"] == [0.0] * 4
    plain = answer(call, vectors, form_of(body(normalize=False)))
    assert [one["embedding"] for one in plain["data"]] == [list(vector) for vector in vectors]


def test_base64_holds_the_same_float32() -> None:
    call, vector = planned([[1]]), (0.1, -2.5, 1e-30, 3e38)
    numbers = answer(call, [vector], EmbeddingForm())["data"][0]["embedding"]
    raw = base64.b64decode(answer(call, [vector], form_of(body(encoding_format="base64")))["data"][0]["embedding"])
    assert np.frombuffer(raw, "<f4").tolist() == numbers
    assert np.linalg.norm(np.array(numbers, np.float64)) == pytest.approx(1.0)
