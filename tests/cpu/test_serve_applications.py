"""A real server whose two applications and one key share a single copy of a tiny model's weights."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import Server, tiny_model

CONFIG = """
api-key-file = "{keys}"
memory = "32MiB"
page-size = "64KiB"
threads = 1
[models.chat]
path = "{path}"
kv_ceiling = "4MiB"
[applications.support]
model = "chat"
ttft = "5min"
tpot = "5min"
priority = 10
[applications.impossible]
model = "chat"
ttft = "1us"
tpot = "1us"
[applications.alices]
model = "chat"
ttft = "5min"
key = "alice"
"""
KEYS = '[keys.alice]\nkey = "alice-0123456789"\n[keys.bob]\nkey = "bob-0123456789"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("applications")
    tiny_model(folder / "tiny")
    (folder / "keys.toml").write_text(KEYS)
    (folder / "keys.toml").chmod(0o600)
    (folder / "janus.toml").write_text(CONFIG.format(keys=folder / "keys.toml", path=folder / "tiny"))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server("--config", str(folder / "janus.toml"), "--log-format", "json") as server:
        yield server


def ask(server: Server, path: str, body: dict[str, Any] | None = None, key: str = "bob") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}-0123456789", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, data, headers), timeout=60) as reply:
            text = reply.read().decode()
            return reply.status, json.loads(text) if text.startswith("{") else text
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def bodies(model: str) -> dict[str, dict[str, Any]]:
    """A body for every route that generates or tokenizes."""
    messages = [{"role": "user", "content": "hi"}]
    return {
        "/v1/chat/completions": {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0},
        "/v1/completions": {"model": model, "prompt": "the quick", "max_tokens": 6, "temperature": 0},
        "/v1/responses": {"model": model, "input": "hi", "max_output_tokens": 6, "temperature": 0},
        "/v1/messages": {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0},
        "/v1/embeddings": {"model": model, "input": "the quick"},
        "/tokenize": {"model": model, "prompt": "the quick"},
        "/detokenize": {"model": model, "tokens": [3, 4, 5]},
        "/v1/responses/input_tokens": {"model": model, "input": "hi"},
        "/v1/messages/count_tokens": {"model": model, "messages": messages},
    }


def told(answer: dict[str, Any]) -> Any:
    """What an answer says beside its name, id and time."""
    fixed = ("id", "created", "created_at", "completed_at", "model", "usage")
    text = json.dumps({name: value for name, value in answer.items() if name not in fixed})
    return [part for part in text.replace('"', " ").split() if not part.startswith(("msg_", "rs_", "fc_"))]


def metrics_of(server: Server) -> dict[str, float]:
    found: dict[str, float] = {}
    _, text = ask(server, "/metrics")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_every_api_takes_an_applications_name_and_answers_as_its_model(server: Server) -> None:
    for path, body in bodies("chat").items():
        status, base = ask(server, path, body)
        assert status == 200, (path, base)
        status, answer = ask(server, path, bodies("support")[path])
        assert status == 200, (path, answer)
        assert told(answer) == told(base)
        assert base.get("model", "chat") == "chat"
        assert answer.get("model", "support") == "support", path
        assert ask(server, path, bodies("alices")[path])[0] == 404


def test_applications_share_one_copy_and_are_counted_apart(server: Server) -> None:
    before = metrics_of(server)

    def gained(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    for name, key in (("support", "bob"), ("support", "alice"), ("impossible", "bob"), ("chat", "alice")):
        status, answer = ask(server, "/v1/completions", bodies(name)["/v1/completions"], key)
        assert (status, answer["model"]) == (200, name)
    after = metrics_of(server)
    for application, kind, promised, attained in (
        ("support", "overall", 2, 2), ("support", "tokens", 2, 2), ("impossible", "ttft", 1, 0),
        ("impossible", "overall", 1, 0), ("alices", "ttft", 1, 1), ("alices", "overall", 1, 1),
    ):  # fmt: skip
        labels = f'{{application="{application}",kind="{kind}"}}'
        assert gained(f"janus_application_promised_total{labels}") == promised, labels
        assert gained(f"janus_application_attained_total{labels}") == attained, labels
    assert gained('janus_application_tokens_total{application="impossible"}') == 6
    assert gained('janus_application_late_tokens_total{application="impossible"}') == 6
    assert gained('janus_application_requests_total{application="alices",model="chat",outcome="ok"}') == 1
    assert 'janus_application_promised_total{application="alices",kind="tokens"}' not in after
    weights = [name for name in after if name.startswith("janus_pool_pages") and 'kind="weights"' in name]
    assert weights == ['janus_pool_pages{kind="weights",model_name="chat"}']
    (cut,) = [name for name in after if name.startswith("vllm:cache_config_info")]
    assert 'num_gpu_blocks="64"' in cut  # kv_ceiling in pages


def test_models_lists_what_the_key_may_use(server: Server) -> None:
    listed = {one["id"]: one["parent"] for one in ask(server, "/v1/models")[1]["data"]}
    assert listed == {"chat": None, "support": "chat", "impossible": "chat"}
    listed = {one["id"]: one["parent"] for one in ask(server, "/v1/models", key="alice")[1]["data"]}
    assert listed == {"chat": None, "support": "chat", "impossible": "chat", "alices": "chat"}
    assert ask(server, "/v1/models/alices")[0] == 404
    assert ask(server, "/v1/models/alices", key="alice")[1]["root"] == "chat"
    assert ask(server, "/tokenizer_info?model=support")[1]["model"] == "support"


def test_the_log_names_model_and_application(server: Server) -> None:
    ask(server, "/v1/completions", bodies("support")["/v1/completions"])
    server.read_until('"application": ?"support"')
    line = next(line for line in reversed(server.log.splitlines()) if '"support"' in line)
    assert json.loads(line)["model"] == "chat"


def test_a_key_that_nobody_has_stops_the_start(folder: Path) -> None:
    file = folder / "typo.toml"
    file.write_text((folder / "janus.toml").read_text().replace('key = "alice"', 'key = "alcie"'))
    with Server("--config", str(file), wait=False) as server:
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert server.process.wait(30) == 2
    assert 'janus: [applications.alices]: no API key is called "alcie"; did you mean "alice"' in said
    assert "Traceback" not in said
