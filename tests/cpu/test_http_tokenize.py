"""/tokenize, /detokenize and /tokenizer_info over real sockets, with a real tokenizer in a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fake_engine import FakeModel
from http_server import Server, is_error, served
from scripted import DIALECT
from server_process import TEMPLATE, tiny_tokenizer
from test_http_docs import strictly

from janus_server.api import tokenize
from janus_server.api.bodies import Limits
from janus_server.tokens.tokenizer import Tokenizer

END = "<|im_end|>"
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": f"the quick {END} fox"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(tiny_tokenizer(tmp_path_factory.mktemp("tokens")))


@pytest_asyncio.fixture
async def server(tokenizer: Tokenizer) -> AsyncIterator[Server]:
    model = FakeModel()
    model.tokenizer = tokenizer  # type: ignore[assignment]
    async with served(model) as server:
        yield server


async def encoded(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    status, answer = await server.post("/tokenize", body)
    assert status == 200, answer
    assert answer["count"] == len(answer["tokens"])
    return answer  # type: ignore[no-any-return]


@pytest.mark.parametrize("text", ["the quick brown fox", "", f"a{END}b", "naïve 🦊\n\n", "x" * 5000])
@pytest.mark.parametrize("special", [True, False])
async def test_a_prompt_becomes_the_ids_that_completions_run(server: Server, text: str, special: bool) -> None:
    server.model.target = msgspec.structs.replace(server.model.target, context_tokens=10_000)
    answer = await encoded(server, {"model": "fake", "prompt": text, "add_special_tokens": special})
    assert answer["token_strs"] is None
    if answer["tokens"]:
        body = {"model": "fake", "prompt": text, "add_special_tokens": special, "max_tokens": 1}
        status, _ = await server.post("/v1/completions", body)
        assert status == 200
        assert list(server.model.requests[-1].prompt) == answer["tokens"]
    status, back = await server.post("/detokenize", {"tokens": answer["tokens"]})
    assert (status, back) == (200, {"prompt": text})


async def test_a_conversation_becomes_the_ids_that_chat_runs(server: Server, tokenizer: Tokenizer) -> None:
    answer = await encoded(server, {"messages": TALK})
    status, _ = await server.post("/v1/chat/completions", {"model": "fake", "messages": TALK, "max_tokens": 1})
    assert status == 200
    assert list(server.model.requests[-1].prompt) == answer["tokens"]
    # What a message spells is text: only the template's own ends are tokens.
    end = tokenizer.encode(END, add_special=False, parse_special=True)
    assert answer["tokens"].count(end[0]) == len(TALK)
    shorter = await encoded(server, {"messages": TALK, "add_generation_prompt": False})
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert shorter["count"] < answer["count"]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True}},
    {"type": "function", "function": {"name": "clock", "description": "tells the time"}},
]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": "required"},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}, "tools": []},
    ],
)
async def test_tools_and_effort_cost_what_they_cost_in_chat(
    server: Server, tmp_path: Path, fields: dict[str, Any]
) -> None:
    folder = tiny_tokenizer(tmp_path)
    shown = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% if enable_thinking is false %}no{% endif %}"
    (folder / "chat_template.jinja").write_text(shown + TEMPLATE)
    server.model.tokenizer = Tokenizer.from_folder(folder)  # type: ignore[assignment]
    server.model.target = msgspec.structs.replace(server.model.target, dialect=DIALECT)
    answer = await encoded(server, {"messages": TALK, **fields})
    body = {"model": "fake", "messages": TALK, "max_tokens": 1, **fields}
    status, chat = await server.post("/v1/chat/completions", body)
    assert status == 200, chat
    assert chat["usage"]["prompt_tokens"] == answer["count"]
    assert list(server.model.requests[-1].prompt) == answer["tokens"]
    # Those that the model is told of are there.
    plain = await encoded(server, {"messages": TALK})
    assert (answer["tokens"] == plain["tokens"]) == (fields.get("tool_choice") == "none")


async def test_what_chat_refuses_is_refused_here(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"messages": TALK, "tools": TOOLS})
    assert (status, is_error(answer)["param"]) == (400, "tools")  # this model's template knows none


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "x" * 9000}, "prompt"), ({"messages": [{**TALK[0], "content": "x" * 9000}]}, "messages")],
)
async def test_a_hopeless_text_is_not_encoded(tokenizer: Tokenizer, body: dict[str, Any], param: str) -> None:
    model = FakeModel()
    model.tokenizer = tokenizer  # type: ignore[assignment]
    async with served(model, Limits(hopeless_chars=100)) as server:
        status, answer = await server.post("/tokenize", body)
    error = is_error(answer)
    assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")


async def test_token_strs_are_the_entries_of_the_vocabulary(server: Server) -> None:
    answer = await encoded(server, {"prompt": f"the fox{END}", "return_token_strs": True})
    assert "".join(answer["token_strs"]) == f"theĠfox{END}"
    assert answer["max_model_len"] == 512
    strictly(tokenize.Tokenized, answer)


async def test_what_lm_eval_asks_of_a_remote_tokenizer(server: Server, tokenizer: Tokenizer) -> None:
    async with server.http.get("/tokenizer_info") as response:
        assert response.status == 200
        info = await response.json()
    strictly(tokenize.TokenizerInfo, info)
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == (END, "<|endoftext|>", None)
    assert info["chat_template"] == TEMPLATE
    assert (info["tokenizer_class"], info["vocab_size"], info["max_model_len"]) == ("BPE", tokenizer.vocab_size, 512)
    eos = await encoded(server, {"prompt": info["eos_token"], "add_special_tokens": False})
    assert eos["tokens"] == [tokenizer.eos_ids[0]]


async def test_the_v1_paths_are_the_same(server: Server) -> None:
    body = {"prompt": "the fox"}
    assert await server.post("/v1/tokenize", body) == await server.post("/tokenize", body)
    assert (await server.post("/v1/detokenize", {"tokens": [5, 6]}))[0] == 200
    async with server.http.get("/v1/tokenizer_info", params={"model": "fake"}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("tokens", "param"), [([1, 300], "tokens"), ([-1], "tokens"), ([2**70], "tokens"), ([True], "tokens")]
)
async def test_ids_out_of_range_are_refused_by_place(server: Server, tokens: list[int], param: str) -> None:
    status, answer = await server.post("/detokenize", {"tokens": tokens})
    assert status == 400
    assert is_error(answer)["param"].startswith(param)


async def test_a_model_must_be_named_where_there_are_several(server: Server) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        status, answer = await server.post(path, {**body, "model": "nobody"})
        assert (status, is_error(answer)["code"]) == (404, "model_not_found")
    server.node.models["other"] = FakeModel("other")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        status, answer = await server.post(path, body)
        assert (status, is_error(answer)["param"]) == (400, "model")
        assert (await server.post(path, {**body, "model": "fake"}))[0] == 200
    async with server.http.get("/tokenizer_info") as response:
        assert response.status == 400
        assert is_error(await response.json())["param"] == "model"


async def test_nothing_is_tokenized_while_models_load(server: Server) -> None:
    server.node.reason = "the models are still loading"
    status, answer = await server.post("/tokenize", {"prompt": "x"})
    assert (status, is_error(answer)["code"]) == (503, "not_ready")


async def test_a_template_that_refuses_is_a_400(server: Server) -> None:
    talk = [{"role": "user", "content": [{"type": "image_url"}]}]
    status, answer = await server.post("/tokenize", {"messages": talk})
    assert status == 400
    assert is_error(answer)["param"] == "messages[0].content[0].type"


async def test_a_body_beyond_the_bound_is_a_413(server: Server) -> None:
    status, answer = await server.post("/tokenize", {"prompt": "x" * (300 * 1024)})
    assert (status, is_error(answer)["code"]) == (413, "body_too_large")
