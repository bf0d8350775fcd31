"""LangChain talks to the server through its OpenAI package: chat, streams, tools, structured answers, embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest
import tiktoken
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from live_server import LiveServer, counted, idle

pytestmark = pytest.mark.timeout(120)


def chat_model(server: LiveServer, name: str = "tiny", **more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.v1, api_key="unused", model=name, temperature=0, max_retries=0, timeout=60,
        **{"max_completion_tokens": 16, **more},
    )  # fmt: skip


def test_an_answer_and_its_usage(server: LiveServer) -> None:
    reply = chat_model(server).invoke([SystemMessage("Be brief."), HumanMessage("the quick brown fox")])
    assert isinstance(reply, AIMessage)
    assert reply.content
    assert reply.response_metadata["finish_reason"] in ("stop", "length")
    assert reply.response_metadata["model_name"] == "tiny"
    usage = reply.usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 1 <= usage["output_tokens"] <= 16


def test_a_stream_is_the_whole_answer(server: LiveServer) -> None:
    model = chat_model(server, stream_usage=True)
    whole = model.invoke("the lazy dog")
    chunks = list(model.stream("the lazy dog"))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert len(chunks) > 3
    assert joined.content == whole.content
    assert joined.usage_metadata == whole.usage_metadata
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]

    async def gathered() -> list[AIMessageChunk]:
        return [chunk async for chunk in model.astream("the lazy dog")]

    assert "".join(str(chunk.content) for chunk in asyncio.run(gathered())) == whole.content


def test_a_batch_runs_together_and_leaves_nothing(server: LiveServer) -> None:
    before = server.until(idle)
    replies = chat_model(server).batch([f"question {i}" for i in range(12)], config={"max_concurrency": 6})
    after = server.until(idle)
    made = sum(reply.usage_metadata["output_tokens"] for reply in replies)
    name = "vllm:generation_tokens_total"
    assert counted(after, name) - counted(before, name) == made


def test_log_probabilities_arrive(server: LiveServer) -> None:
    reply = chat_model(server, logprobs=True, top_logprobs=3).invoke("fox")
    entries = reply.response_metadata["logprobs"]["content"]
    assert len(entries) == reply.usage_metadata["output_tokens"]
    assert all(len(entry["top_logprobs"]) == 3 for entry in entries)


def test_the_completions_model_answers_and_streams(server: LiveServer) -> None:
    model = OpenAI(base_url=server.v1, api_key="unused", model="tiny", temperature=0, max_tokens=10, max_retries=0)
    whole = model.invoke("the quick")
    assert whole
    assert "".join(model.stream("the quick")) == whole
    assert model.generate(["the quick", "lazy"]).generations[0][0].text == whole


@tool
def weather(city: str, days: int) -> str:
    """The weather of the coming days."""
    return f"sunny in {city} for {days} days"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_tool_is_called_and_its_result_is_answered(speaker: LiveServer, stream: bool) -> None:
    model = chat_model(speaker, "speaker").bind_tools([weather])
    question = HumanMessage("How will the weather be in Paris?")
    asked: Any = model.invoke([question])
    if stream:
        chunks = list(model.stream([question]))
        asked = chunks[0]
        for chunk in chunks[1:]:
            asked += chunk
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris", "days": 2})
    assert asked.invalid_tool_calls == []
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([question, asked, result]).content == "It will be sunny in Paris."


class Verdict(pydantic.BaseModel):
    """Whether it is so."""

    colour: Literal["red", "green"]
    sure: bool


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(server: LiveServer, speaker: LiveServer, method: Any) -> None:
    """By schema from the random model; by a forced function from one whose template knows tools."""
    if method == "json_schema":
        model = chat_model(server, max_completion_tokens=200)
    else:
        model = chat_model(speaker, "speaker", max_completion_tokens=200)
    assert isinstance(model.with_structured_output(Verdict, method=method).invoke("Is it red?"), Verdict)


@pytest.fixture
def encoding() -> Iterator[str]:
    """A tiktoken encoding of single bytes under the model's name: the package's own ones would be fetched."""
    name = "bytes-of-tests"
    ranks = {bytes([i]): i for i in range(256)}
    made = tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={})
    tiktoken.registry.ENCODINGS[name] = made
    tiktoken.model.MODEL_TO_ENCODING["tiny"] = name
    yield name
    del tiktoken.registry.ENCODINGS[name], tiktoken.model.MODEL_TO_ENCODING["tiny"]


def test_embeddings_are_asked_for_by_token_ids_and_by_texts(server: LiveServer, encoding: str) -> None:
    by_ids = OpenAIEmbeddings(base_url=server.v1, api_key="unused", model="tiny", max_retries=0)
    vectors = by_ids.embed_documents(["the quick", "brown fox", "the quick"])
    assert len(vectors) == 3
    assert vectors[0] == pytest.approx(vectors[2])
    assert vectors[0] != vectors[1]
    by_texts = OpenAIEmbeddings(
        base_url=server.v1, api_key="unused", model="tiny", max_retries=0, check_embedding_ctx_length=False
    )
    assert len(by_texts.embed_query("the quick")) == len(vectors[0])
