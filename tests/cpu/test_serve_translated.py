"""/v1/responses and /v1/messages of a real server process, with the clients that people use."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from server_process import Server, tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    with Server(f"a={model}", "--memory", "64MiB", "--page-size", str(1 << 14)) as running:
        yield running


@pytest.fixture
def chatted(server: Server) -> str:
    """What chat says to the same words."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        words = [{"role": "system", "content": "jump"}, {"role": "user", "content": "the quick brown fox"}]
        answer = client.chat.completions.create(model="a", messages=words, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_responses(server: Server, chatted: str) -> None:
    asked = {"model": "a", "input": "the quick brown fox", "instructions": "jump", "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked, max_output_tokens=12)
        with client.responses.stream(**asked, max_output_tokens=12) as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        counted = client.responses.input_tokens.count(model="a", input="the quick brown fox", instructions="jump")
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked, max_output_tokens=5000)
    assert whole.output_text == "".join(pieces) == chatted
    assert whole.usage is not None
    assert counted.input_tokens == whole.usage.input_tokens
    assert caught.value.param == "max_output_tokens"


def test_messages(server: Server, chatted: str) -> None:
    asked = {"model": "a", "system": "jump", "messages": [{"role": "user", "content": "the quick brown fox"}]}
    sampled = {**asked, "max_tokens": 12, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**sampled)
        with client.messages.stream(**sampled) as stream:
            text = "".join(stream.text_stream)
        counted = client.messages.count_tokens(**asked)
        stop = chatted[3:6]
        cut = client.messages.create(**sampled, stop_sequences=[stop])
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**{**sampled, "max_tokens": 5000})
    assert whole.content[0].type == "text"
    assert whole.content[0].text == text == chatted
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].type == "text"
    assert cut.content[0].text == chatted[: chatted.index(stop)]
    assert caught.value.type == "invalid_request_error"
    assert "max_tokens" in str(caught.value)
