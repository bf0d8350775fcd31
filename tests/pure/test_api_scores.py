"""Scored prompts (echo with logprobs), answers without a token, and best_of: what is planned and what is written."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from janus_server import types
from janus_server.api import parse, plan, reply
from janus_server.api.bodies import Limits
from janus_server.errors import Bug, Refused

LIMITS = Limits()
TARGET = plan.Target("m", 100, 300, (257,), types.Sampling())
LABEL = plan.Label("cmpl-1", 1_700_000_000, 42)
STOP, LENGTH = types.FinishReason.STOP, types.FinishReason.LENGTH


class Bytes:
    """A tokenizer whose token i is byte i; 256 and up are special and spell their number."""

    strips_first_space = False

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def is_special(self, token: int) -> bool:
        return token >= 256

    def decode(self, ids: tuple[int, ...], skip_special: bool) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special).decode("utf-8", "replace")


def planned(
    prompts: list[list[int]], limits: Limits = LIMITS, target: plan.Target = TARGET, **fields: Any
) -> plan.Call:
    body = parse.parse_completion(json.dumps({"model": "m", "prompt": prompts, **fields}).encode(), limits)
    call = plan.plan_completion(body, prompts, target, limits, LABEL)
    if not body.echo:
        return call
    texts = tuple(Bytes().decode(one.prompt, one.skip_special_tokens) for one in call.requests)
    return msgspec.structs.replace(call, echo=texts)


def whole(call: plan.Call, deltas: list[tuple[int, types.Delta]]) -> dict[str, Any]:
    answer = reply.WholeReply(call, Bytes())  # type: ignore[arg-type]
    for prompt, delta in deltas:
        answer.add(prompt, delta)
    return json.loads(answer.body())


def stream(call: plan.Call, deltas: list[tuple[int, types.Delta]]) -> list[dict[str, Any]]:
    answer = reply.StreamReply(call, Bytes())  # type: ignore[arg-type]
    events = b"".join(answer.events(prompt, delta) for prompt, delta in deltas).split(b"\n\n")
    return [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events if event]


def score(token: int, value: float, *others: tuple[int, float]) -> types.TokenLogprob:
    return types.TokenLogprob(token, value, others)


# Special 299, then "a€b": the euro sign is three tokens.
PROMPT = [299, 97, 0xE2, 0x82, 0xAC, 98]
SCORES = tuple(score(token, -1.0 - i, (97, -0.5)) for i, token in enumerate(PROMPT[1:]))
FIRST = types.Delta(0, "x", (120,), (score(120, -0.25, (120, -0.25)),), prompt_logprobs=SCORES)


class TestPlan:
    def test_echo_with_logprobs_scores_the_prompts(self) -> None:
        call = planned([[1, 2], [3]], echo=True, logprobs=2, n=2)
        assert [one.prompt_logprobs for one in call.requests] == [2, 2]
        assert [one.prompt_logprobs for one in planned([[1]], logprobs=2).requests] == [None]
        assert [one.prompt_logprobs for one in planned([[1]], echo=True).requests] == [None]
        assert [one.prompt_logprobs for one in planned([[1]], echo=True, logprobs=0).requests] == [0]

    def test_no_token_at_all_where_the_prompt_is_shown(self) -> None:
        assert planned([[1] * 100], echo=True, max_tokens=0).requests[0].max_tokens == 0
        with pytest.raises(Refused, match="max_tokens must be at least 1 without echo"):
            planned([[1]], max_tokens=0)
        with pytest.raises(Refused, match="context"):
            planned([[1] * 101], echo=True, max_tokens=0)
        with pytest.raises(Refused, match="context"):
            planned([[1] * 100], echo=True, max_tokens=1)

    def test_what_would_be_written_is_bounded(self) -> None:
        limits = Limits(scores=60)
        planned([[1] * 10, [2] * 5], limits, echo=True, logprobs=1, n=2)
        for fields in ({"logprobs": 2, "n": 2}, {"logprobs": 1, "n": 3}):
            with pytest.raises(Refused, match="log probabilities") as caught:
                planned([[1] * 10, [2] * 5], limits, echo=True, **fields)
            assert caught.value.param == "logprobs"

    def test_best_of_makes_more_choices_than_it_shows(self) -> None:
        call = planned([[1]], n=2, best_of=5)
        assert (call.n, call.best, call.logprobs, call.requests[0].n) == (5, 2, False, 5)
        assert call.requests[0].sampling.logprobs == 0
        assert planned([[1]], n=2, best_of=5, logprobs=3).requests[0].sampling.logprobs == 3
        for same in (planned([[1]], n=2, best_of=2), planned([[1]], n=2)):
            assert (same.n, same.best, same.requests[0].sampling.logprobs) == (2, None, None)

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"best_of": 129}, "best_of"),
            ({"best_of": 2, "stream": True}, "best_of"),
            ({"prompt": [[1]] * 100, "best_of": 21}, "best_of"),
            ({"best_of": 128, "max_tokens": 99, "n": 1}, "max_tokens"),
        ],
    )
    def test_best_of_counts_towards_every_bound(self, fields: dict[str, Any], param: str) -> None:
        with pytest.raises(Refused) as caught:
            planned(
                fields.get("prompt", [[1]]),
                Limits(total_tokens=12_000),
                **{k: fields[k] for k in fields if k != "prompt"},
            )
        assert caught.value.param == param


class TestEchoedScores:
    def test_whole_answer(self) -> None:
        call = planned([PROMPT], echo=True, logprobs=1, max_tokens=2)
        choice = whole(call, [(0, FIRST), (0, types.Delta(0, "y", (121,), (score(121, -3.0, (5, -0.1)),), LENGTH))])[
            "choices"
        ][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == "a€bxy"
        assert logprobs["tokens"] == ["<299>", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b", "x", "y"]
        assert logprobs["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0, -5.0, -0.25, -3.0]
        assert logprobs["top_logprobs"][:3] == [None, {"a": -0.5}, {"a": -0.5, "bytes:\\xe2": -2.0}]
        assert logprobs["text_offset"] == [0, 0, 1, 1, 1, 2, 3, 4]

    def test_the_special_token_has_its_place_where_it_is_shown(self) -> None:
        call = planned([PROMPT], echo=True, logprobs=1, skip_special_tokens=False)
        choice = whole(call, [(0, FIRST), (0, types.Delta(0, finish=STOP))])["choices"][0]
        assert choice["text"] == "<299>a€bx"
        assert choice["logprobs"]["text_offset"] == [0, 5, 6, 6, 6, 7, 8]

    def test_every_choice_shows_them_in_a_stream_with_its_first_event(self) -> None:
        call = planned([PROMPT], echo=True, logprobs=1, n=2, stream=True)
        other = types.Delta(1, "z", (122,), (score(122, -1.5),))
        then = types.Delta(0, "y", (121,), (score(121, -3.0),), LENGTH)
        events = stream(call, [(0, FIRST), (0, then), (0, other), (0, types.Delta(1, finish=STOP))])
        assert [(event["index"], event["text"]) for event in events] == [(0, "a€bx"), (0, "y"), (1, "a€bz"), (1, "")]
        assert [len(e["logprobs"]["tokens"]) if e["logprobs"] else None for e in events] == [7, 1, 7, None]
        assert events[0]["logprobs"]["token_logprobs"][:-1] == events[2]["logprobs"]["token_logprobs"][:-1]
        assert [event["logprobs"]["text_offset"][-1] for event in events[:3]] == [3, 4, 3]
        whole_call = msgspec.structs.replace(call, stream=False)
        done = whole(whole_call, [(0, FIRST), (0, then), (0, other), (0, types.Delta(1, finish=STOP))])
        assert done["choices"][1]["logprobs"] == events[2]["logprobs"]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_scored_only(self, streamed: bool) -> None:
        call = planned([PROMPT, [97]], echo=True, logprobs=0, max_tokens=0, stream=streamed)
        deltas = [(0, types.Delta(0, finish=LENGTH, prompt_logprobs=SCORES)), (1, types.Delta(0, finish=LENGTH))]
        choices = stream(call, deltas) if streamed else whole(call, deltas)["choices"]
        assert [choice["text"] for choice in choices] == ["a€b", "a"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 2
        assert choices[1]["logprobs"] == {
            "tokens": ["a"], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]
        }  # fmt: skip

    def test_scores_that_are_missing_are_never_papered_over(self) -> None:
        call = planned([PROMPT], echo=True, logprobs=1)
        with pytest.raises(Bug, match="before it was scored"):
            whole(call, [(0, types.Delta(0, "x", (120,), (score(120, -1.0),), STOP, prompt_logprobs=SCORES[:-1]))])


class TestBestOf:
    def answers(self, call: plan.Call) -> list[tuple[int, types.Delta]]:
        """Means -2, -1, -1.5 and -1 for the first prompt; the second's are turned round."""
        values = {0: (-1.0, -3.0), 1: (-1.0,), 2: (-1.0, -1.0, -2.5), 3: (-0.5, -1.5)}
        deltas = []
        for prompt in range(2):
            for index in range(4):
                chosen = values[index if prompt == 0 else 3 - index]
                for i, value in enumerate(chosen):
                    finish = STOP if i + 1 == len(chosen) else None
                    deltas.append((prompt, types.Delta(index, f"{index}", (50,), (score(50, value),), finish)))
        return deltas

    def test_the_likeliest_are_shown_by_rank_and_all_are_counted(self) -> None:
        call = planned([[1], [2]], n=2, best_of=4)
        answer = whole(call, self.answers(call))
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in answer["choices"]] == ["1", "33", "00", "2"]
        assert {choice["logprobs"] for choice in answer["choices"]} == {None}
        assert answer["usage"]["completion_tokens"] == 2 * (2 + 1 + 3 + 2)

    def test_with_logprobs_asked_for(self) -> None:
        call = planned([[1], [2]], n=1, best_of=4, logprobs=0)
        answer = whole(call, self.answers(call))
        assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[-1.0], [-0.5, -1.5]]
