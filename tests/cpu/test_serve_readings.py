"""Scored prompts, embeddings and best_of through a real server, as graders and openai-python ask for them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from server_process import Server, post, tiny_model
from transformers import AutoModelForCausalLM

NEAR = 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(
        f"m={folder}", "--memory", "64MiB", "--page-size", str(1 << 14), "--max-num-batched-tokens", "48"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


def ids(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 290, count)]


def log_softmax(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()


class TestLogLikelihoods:
    """What lm-eval's `local-completions` sends for its log-likelihood tasks, and how it reads the answer."""

    def test_a_batch_of_id_lists(self, server: Server, reference: torch.nn.Module) -> None:
        requests = [(ids(20, 1), ids(6, 2)), (ids(75, 3), ids(1, 4)), (ids(3, 5), ids(40, 6))]
        # One continuation that the model itself would write, so that greediness is seen as such.
        context = ids(12, 7)
        greedy = list(context)
        for _ in range(5):
            greedy.append(int(log_softmax(reference, greedy)[-1].argmax()))
        requests.append((context, greedy[12:]))
        status, raw = post(f"{server.url}/v1/completions", json.dumps({
            "model": "m", "prompt": [context + rest for context, rest in requests], "temperature": 0, "max_tokens": 1,
            "logprobs": 1, "seed": 1234, "echo": True,
        }).encode())  # fmt: skip
        assert status == 200
        choices = sorted(json.loads(raw)["choices"], key=lambda choice: choice["index"])
        for choice, (context, rest) in zip(choices, requests, strict=True):
            logprobs = choice["logprobs"]
            start = len(context)
            mine = logprobs["token_logprobs"][start:-1]
            tops = logprobs["top_logprobs"][start:-1]
            theirs = log_softmax(reference, context + rest)
            expected = [theirs[start + i - 1][token] for i, token in enumerate(rest)]
            assert mine == pytest.approx(expected, abs=NEAR)
            assert sum(mine) == pytest.approx(sum(expected), abs=NEAR * len(rest))
            is_greedy = all(value == max(top.values()) for value, top in zip(mine, tops, strict=True))
            assert is_greedy == all(int(theirs[start + i - 1].argmax()) == token for i, token in enumerate(rest))
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            assert len(logprobs["tokens"]) == start + len(rest) + 1
        assert is_greedy

    def test_scored_only(self, server: Server, reference: torch.nn.Module) -> None:
        tokens = ids(60, 8)
        body = {"model": "m", "prompt": tokens, "max_tokens": 0, "logprobs": 0, "echo": True, "stream": True}
        status, raw = post(f"{server.url}/v1/completions", json.dumps(body).encode())
        assert status == 200
        event, done, rest = raw.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
        assert choice["finish_reason"] == "length"
        theirs = log_softmax(reference, tokens)
        expected = [theirs[i][token] for i, token in enumerate(tokens[1:])]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=NEAR)

    def test_offsets_lead_into_the_text(self, client: openai.OpenAI) -> None:
        asked: dict[str, Any] = dict(model="m", prompt="<|im_start|>the quick brown fox", max_tokens=6, temperature=0,
                                     logprobs=1, echo=True, n=2, extra_body={"ignore_eos": True})  # fmt: skip
        answer = client.completions.create(**asked)
        pieces: dict[int, list[Any]] = {0: [], 1: []}
        for chunk in client.completions.create(**asked, stream=True):
            pieces[chunk.choices[0].index].append(chunk.choices[0])
        for choice in answer.choices:
            logprobs = choice.logprobs
            assert logprobs is not None and logprobs.text_offset and logprobs.tokens
            assert choice.text.startswith("the quick brown fox")
            places = list(zip(logprobs.tokens, logprobs.text_offset, logprobs.text_offset[1:], strict=False))
            shown = [(name, choice.text[start:end]) for name, start, end in places[:-5]]
            assert shown[0] == ("<|im_start|>", "") and all(name == text for name, text in shown[1:])
            streamed = pieces[choice.index]
            assert "".join(piece.text for piece in streamed) == choice.text
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                parts = [getattr(piece.logprobs, key) for piece in streamed if piece.logprobs]
                assert [one for part in parts for one in part] == getattr(logprobs, key)


class TestEmbeddings:
    def test_through_openai_python(self, client: openai.OpenAI, reference: torch.nn.Module) -> None:
        """It asks for base64 and decodes it by itself."""
        inputs = [ids(70, 1), ids(5, 2), ids(1, 3)]
        answer = client.embeddings.create(model="m", input=inputs)
        floats = client.embeddings.create(model="m", input=inputs, encoding_format="float")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 76
        for tokens, one, other in zip(inputs, answer.data, floats.data, strict=True):
            with torch.no_grad():
                states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].double()
            mean = states.mean(0).numpy()
            assert one.embedding == pytest.approx(mean / np.linalg.norm(mean), abs=NEAR)
            assert one.embedding == pytest.approx(other.embedding, abs=1e-7)
        last = client.embeddings.create(
            model="m", input=inputs[0], encoding_format="float", extra_body={"pooling": "last", "normalize": False}
        )
        with torch.no_grad():
            states = reference(torch.tensor([inputs[0]]), output_hidden_states=True).hidden_states[-1][0]
        assert last.data[0].embedding == pytest.approx(states[-1].numpy(), abs=NEAR * 5)

    def test_texts_and_what_they_cost(self, server: Server, client: openai.OpenAI) -> None:
        before = server.metrics()
        one = client.embeddings.create(model="m", input="the quick brown fox")
        both = client.embeddings.create(model="m", input=["lazy dog", "the quick brown fox"])
        assert both.data[1].embedding == one.data[0].embedding
        assert [item.index for item in both.data] == [0, 1]
        after = server.metrics()
        name = "vllm:prompt_tokens_total{engine=0,model_name=m}"
        assert after[name] - before[name] == one.usage.prompt_tokens + both.usage.prompt_tokens

    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"input": [5] * 513}, "input", "context_length_exceeded"),
            ({"input": "fox " * 40_000}, "input", "context_length_exceeded"),
            ({"input": ""}, "input", "invalid_value"),
            ({"input": [[300]]}, "input", "invalid_value"),
            ({"input": "x", "dimensions": 8}, "dimensions", "invalid_value"),
        ],
    )
    def test_refusals(self, server: Server, fields: dict[str, Any], param: str, code: str) -> None:
        status, raw = post(f"{server.url}/v1/embeddings", json.dumps({"model": "m", **fields}).encode())
        error = json.loads(raw)["error"]
        assert (status, error["param"], error["code"]) == (400, param, code)

    def test_base64_is_little_endian_float32(self, server: Server) -> None:
        body = {"model": "m", "input": [7, 8, 9], "encoding_format": "base64", "dimensions": 64, "user": "somebody"}
        status, raw = post(f"{server.url}/v1/embeddings", json.dumps(body).encode())
        assert status == 200
        numbers = np.frombuffer(base64.b64decode(json.loads(raw)["data"][0]["embedding"]), "<f4")
        assert numbers.shape == (64,)
        assert np.linalg.norm(numbers.astype(np.float64)) == pytest.approx(1.0, abs=1e-6)


def test_best_of_shows_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = dict(model="m", prompt="the lazy dog", max_tokens=8, seed=5, temperature=1.0, logprobs=0,
                                 extra_body={"ignore_eos": True})  # fmt: skip
    everything = client.completions.create(**asked, n=6)
    best = client.completions.create(**asked, n=2, best_of=6)

    def mean(choice: Any) -> float:
        return float(np.mean(choice.logprobs.token_logprobs))

    ranked = sorted(everything.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None and best.usage.completion_tokens == 48
