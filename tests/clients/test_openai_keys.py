"""Keys, limits and a full queue, as openai-python and Anthropic's client meet them: typed errors, what is retried."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from live_server import LiveServer, serving
from openai_clients import KINDS, Recorded, chat, complete

pytestmark = pytest.mark.timeout(120)

KEYS = """
[keys.free]
key = "key-without-limits"
[keys.single]
key = "key-for-one-call-at-a-time"
requests = 1
[keys.rare]
key = "key-for-two-calls-a-minute"
requests_per_minute = 2
[keys.small]
key = "key-for-small-calls"
tokens_per_request = 100
[keys.other]
key = "key-for-another-model"
models = ["second"]
"""
LONG: dict[str, Any] = {"max_tokens": 30_000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def locked(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that wants keys."""
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    arguments = [f"tiny={model}", f"second={model}", "--memory", "256MiB", "--api-key-file", str(keys)]
    with serving(folder, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def crowded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server that computes one sequence at a time and lets one more wait."""
    folder = tmp_path_factory.mktemp("crowded")
    arguments = ["--memory", "256MiB", "--max-num-seqs", "1", "--max-queued-requests", "1"]
    with serving(folder, f"tiny={model}", *arguments) as running:
        yield running


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_wrong_key_is_an_authentication_error_that_is_not_retried(locked: LiveServer, kind: str) -> None:
    for call in (chat, complete, lambda api: api.models.list()):
        client = Recorded(kind, locked.v1, api_key="key-of-nobody-at-all")
        with pytest.raises(openai.AuthenticationError) as caught:
            client.run(call)
        assert caught.value.code == "invalid_api_key"
        assert client.statuses == [401]
        assert "key-of-nobody" not in str(caught.value)


def test_a_right_key_is_served(locked: LiveServer, kind: str) -> None:
    assert Recorded(kind, locked.v1, api_key="key-without-limits").run(chat).choices
    with anthropic.Anthropic(base_url=locked.url, api_key="key-without-limits", max_retries=0) as client:
        # This client sends its key in a header of its own.
        reply = client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": "x"}])
    assert reply.role == "assistant"


def test_a_wrong_key_has_anthropics_form_there(locked: LiveServer) -> None:
    with anthropic.Anthropic(base_url=locked.url, api_key="key-of-nobody-at-all", max_retries=0) as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            client.messages.create(model="tiny", max_tokens=4, messages=[{"role": "user", "content": "x"}])
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_a_key_may_see_some_models_only(locked: LiveServer, kind: str) -> None:
    client = Recorded(kind, locked.v1, api_key="key-for-another-model")
    with pytest.raises(openai.NotFoundError) as caught:
        client.run(chat)
    assert caught.value.code == "model_not_found"
    assert client.run(lambda api: chat(api, model="second")).model == "second"


def test_a_call_beyond_the_keys_size_is_a_bad_request(locked: LiveServer, kind: str) -> None:
    client = Recorded(kind, locked.v1, api_key="key-for-small-calls")
    with pytest.raises(openai.BadRequestError) as caught:
        client.run(lambda api: complete(api, max_tokens=200))
    assert (caught.value.code, caught.value.param) == ("key_budget_exceeded", "max_tokens")
    assert client.run(complete).usage.completion_tokens >= 1


def test_a_second_call_at_once_is_a_rate_limit_error_and_a_retry_succeeds(locked: LiveServer, kind: str) -> None:
    key = "key-for-one-call-at-a-time"
    holder = openai.OpenAI(base_url=locked.v1, api_key=key, max_retries=0, timeout=60)
    with complete(holder, stream=True, **LONG) as stream:
        next(iter(stream))
        client = Recorded(kind, locked.v1, api_key=key, max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.run(chat)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = Recorded(kind, locked.v1, api_key=key, max_retries=10)
        leaving = threading.Timer(0.5, stream.close)
        leaving.start()
        assert patient.run(chat).choices
        leaving.join()
    assert patient.statuses[-1] == 200
    assert set(patient.statuses[:-1]) == {429}


def test_more_calls_than_a_minute_allows_are_told_when_to_come_back(locked: LiveServer) -> None:
    client = Recorded("sync", locked.v1, api_key="key-for-two-calls-a-minute", max_retries=0)
    for _ in range(2):
        client.run(chat)
    with pytest.raises(openai.RateLimitError) as caught:
        client.run(chat)
    assert caught.value.code == "rate_limit_exceeded"
    # openai-python waits as long as it is told, up to a minute.
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60


def test_a_full_queue_is_a_rate_limit_error_and_a_retry_succeeds(crowded: LiveServer, kind: str) -> None:
    api = openai.OpenAI(base_url=crowded.v1, api_key="unused", max_retries=0, timeout=60)
    with complete(api, stream=True, **LONG) as running:
        next(iter(running))
        waiting = threading.Thread(target=lambda: complete(api, max_tokens=2))
        waiting.start()
        crowded.until(lambda m: any(k.startswith("vllm:num_requests_waiting{") and v == 1 for k, v in m.items()), 15)
        client = Recorded(kind, crowded.v1, max_retries=0)
        with pytest.raises(openai.RateLimitError) as caught:
            client.run(chat)
        assert caught.value.code == "server_overloaded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        patient = Recorded(kind, crowded.v1, max_retries=10)
        leaving = threading.Timer(0.5, running.close)
        leaving.start()
        assert patient.run(chat).choices
        leaving.join()
    waiting.join(30)
    assert not waiting.is_alive()
    assert set(patient.statuses[:-1]) == {429}
