"""From words on a command line to what is sent: applications, targets, request bytes, prompts of an exact size."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench import applications, serve
from bench.records import Application, Drawn, Endpoint, Plan, Segment, Slo, Written
from bench.serve_options import parse
from bench.target import Caller, Target, make_target
from bench.wording import IdWording, RoughWording, SliceWording, WordWording, draw, load_tokenizer
from janus_server import cli
from janus_server.errors import BadConfig


def target(endpoint: str = "completions", **fields: Any) -> Target:
    return make_target("http://127.0.0.1:8000", endpoint, (), None, **{"insecure": False, **fields})


def caller(endpoint: str = "completions", **fields: Any) -> Caller:
    given_fields: dict[str, Any] = {
        "sampling": {}, "ignore_eos": False, "running_usage": False, "extra_body": {}, "id_prefix": "b-",
    }  # fmt: skip
    return Caller(target(endpoint), IdWording(16, 250, 0), **{**given_fields, **fields})


# Applications and promises


def test_goodput_in_milliseconds() -> None:
    assert applications.parse_goodput(["ttft:500", "tpot:50"]) == Slo(0.5, 0.05)
    assert applications.parse_goodput(["e2el:5e3"]) == Slo(e2el_s=5.0)
    assert applications.parse_goodput([]).empty
    for word, expected in [
        ("tfft:5", 'did you mean "ttft"'),
        ("ttft", "write"),
        ("ttft:x", "'x'"),
        ("ttft:0", "above 0"),
    ]:
        with pytest.raises(BadConfig, match=expected):
            applications.parse_goodput([word])


def test_applications_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "apps.toml"
    file.write_text(
        "[app.chat]\nmodel = 'qwen'\nttft_ms = 500\ntpot_ms = 50\nattain = 0.99\nshare = 3\n"
        "[app.batch]\nrequest_rate = 2.5\ninput_len = 900\noutput_len = 3\nextra_body = { top_k = 5 }\n"
    )
    chat, batch = applications.read_applications(file, Slo(e2el_s=9.0))
    assert chat == Application("chat", "qwen", Slo(0.5, 0.05, None, 0.99), share=3.0)
    assert batch == Application(
        "batch", "batch", Slo(e2el_s=9.0), request_rate=2.5, input_tokens=900, output_tokens=3, extra_body={"top_k": 5}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[app.a]\ntftt_ms = 5", 'did you mean "ttft_ms"'),
        ("[apps.a]", 'did you mean "app"'),
        ("[app.a]\nshare = 0", "share: 0 is not a number above 0"),
        ("[app.a]\nttft_ms = true", "ttft_ms"),
        ("[app.a]\nattain = 1.5", "not a share"),
        ("[app.a]\ninput_len = 1.5", "whole number"),
        ("[app.a]\nextra_body = 3", "not a table"),
        ("[app.a", "Expected"),
        ("", "no application"),
    ],
)
def test_bad_applications_are_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "apps.toml"
    file.write_text(text)
    with pytest.raises(BadConfig, match=expected):
        applications.read_applications(file, Slo())


def test_applications_from_the_workloads_csv(tmp_path: Path) -> None:
    file = tmp_path / "apps.csv"
    file.write_text(
        "app,llm,requests,ttft_slo_s,tpot_slo_ms,pool\n0,Qwen3-0.6B,2,0.5,30,elastic\n1,Qwen3-8B,9,,,steady\n"
    )
    apps = applications.read_applications(file, Slo())
    assert apps == [Application("0", "Qwen3-0.6B", Slo(0.5, 0.03)), Application("1", "Qwen3-8B")]
    renamed = applications.renamed(apps, ["0=a", "Qwen3-8B=b"])
    assert [(a.name, a.model) for a in renamed] == [("0", "a"), ("1", "b")]
    assert [a.model for a in applications.renamed(apps, ["1=x", "*=rest"])] == ["rest", "x"]
    with pytest.raises(BadConfig, match="FROM=TO"):
        applications.renamed(apps, ["x"])
    file.write_text("name\n0\n")
    with pytest.raises(BadConfig, match="no column app"):
        applications.read_applications(file, Slo())


def test_the_shared_workloads_applications(shared: Path) -> None:
    apps = applications.read_applications(shared / "traces" / "workload62" / "apps.csv", Slo())
    assert len(apps) == 62
    assert apps[0].slo == Slo(0.5, 0.03)
    assert all(not app.slo.empty for app in apps)


# Targets and bytes


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "/v1/completions", False)),
        ("127.0.0.1:81/", ("127.0.0.1", 81, "/v1/completions", False)),
        ("http://127.0.0.1:8000/v1/", ("127.0.0.1", 8000, "/v1/completions", False)),
        ("https://127.0.0.1/proxy/v1", ("127.0.0.1", 443, "/proxy/v1/completions", True)),
        ("http://[::1]:9", ("::1", 9, "/v1/completions", False)),
    ],
)
def test_addresses(url: str, expected: tuple[str, int, str, bool]) -> None:
    t = make_target(url, "completions", (), None, insecure=False)
    assert (t.host, t.port, t.path, t.tls is not None) == expected


def test_endpoints() -> None:
    assert target("chat").path == "/v1/chat/completions"
    assert target("/api/v3/chat/completions").endpoint is Endpoint.CHAT
    assert target("/generate").endpoint is Endpoint.COMPLETIONS
    for bad in ("caht", "/a b", "/a\r\nX: y"):
        with pytest.raises(BadConfig, match="--endpoint"):
            target(bad)
    for bad in ("ftp://x", "http://", "http://h:99999", "http://h/?q=1"):
        with pytest.raises(BadConfig, match="--base-url"):
            make_target(bad, "chat", (), None, insecure=False)


def test_keys_and_headers_cannot_smuggle_lines() -> None:
    t = make_target("http://127.0.0.1", "chat", ["X-A=b=c", "X-B: d"], "sk-1", insecure=False)
    assert t.headers == (("X-A", "b=c"), ("X-B", "d"), ("Authorization", "Bearer sk-1"))
    t = make_target("http://127.0.0.1", "chat", ["authorization=Basic x"], "sk-1", insecure=False)
    assert t.headers == (("authorization", "Basic x"),)
    for bad in ("X-A=b\r\nX-B=c", "X A=b", "X-A", "X-A=é"):
        with pytest.raises(BadConfig, match="--header"):
            make_target("http://127.0.0.1", "chat", [bad], None, insecure=False)
    with pytest.raises(BadConfig, match="--header"):
        make_target("http://127.0.0.1", "chat", (), "sk\r\nX: y", insecure=False)


def test_the_bytes_of_a_request() -> None:
    app = Application("a", "m", extra_body={"top_k": 7})
    c = caller(sampling={"temperature": 0.0}, ignore_eos=True, extra_body={"user": "é", "top_k": 3})
    data = c.encode(Plan(0.0, app, Written("hi"), 5), 12)
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[:2] == ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1:8000"]
    assert "x-request-id: b-12" in lines
    assert f"Content-Length: {len(body)}" in lines
    assert json.loads(body) == {
        "model": "m", "prompt": "hi", "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True},
        "temperature": 0.0, "ignore_eos": True, "user": "é", "top_k": 7,
    }  # fmt: skip


def test_chat_bodies_carry_messages() -> None:
    app = Application("a", "m")
    body = caller("chat", running_usage=True).body(Plan(0.0, app, Written(({"role": "user", "content": "x"},)), 5))
    assert body["messages"] == ({"role": "user", "content": "x"},)
    assert body["max_completion_tokens"] == 5
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "prompt" not in body and "max_tokens" not in body


@pytest.mark.parametrize("extra", [{"stream": False}, {"model": "x"}, {"n": 2}, {"best_of": 2}])
def test_an_extra_body_may_not_change_what_is_measured(extra: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match=next(iter(extra))):
        caller(extra_body=extra)


# Prompts of an exact size


def segments(*pairs: tuple[int, int]) -> Drawn:
    return Drawn(tuple(Segment(key, tokens) for key, tokens in pairs))


@given(st.lists(st.tuples(st.integers(0, 2**60), st.integers(1, 700)), min_size=1, max_size=4), st.integers(0, 2**62))
def test_ids_are_exact_in_range_and_share_exactly_the_equal_segments(parts: list[tuple[int, int]], seed: int) -> None:
    words = IdWording(5, 100, seed)
    ids = words.render(segments(*parts))
    assert len(ids) == sum(tokens for _, tokens in parts)
    assert all(5 <= i < 100 for i in ids)
    assert words.render(segments(*parts, (7, 3)))[: len(ids)] == ids
    assert IdWording(5, 100, seed).render(segments(*parts)) == ids


def test_draws_look_random() -> None:
    counts = [0] * 10
    for key in range(50):
        for i in draw(3, key, 200, 10).tolist():
            counts[i] += 1
    # 10,000 draws: each tenth within five standard deviations of 1,000.
    assert all(abs(c - 1000) < 5 * math.sqrt(900) for c in counts)
    assert draw(3, 1, 50, 1000).tolist() != draw(4, 1, 50, 1000).tolist() != draw(3, 2, 50, 1000).tolist()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>"]
    )
    found.train_from_iterator(["the quick brown fox jumps over the lazy dog and runs far away from here"] * 9, trainer)
    return found


@pytest.mark.parametrize("tokens", [1, 2, 17, 600])
def test_texts_have_exactly_the_wanted_tokens(tokenizer: Tokenizer, tokens: int) -> None:
    words = WordWording(tokenizer, 0, adds_special=False)
    text = words.render(segments((1, tokens)))
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == tokens
    longer = words.render(segments((1, tokens), (2, 9)))
    assert longer.startswith(text)


@pytest.mark.parametrize("adds_special", [True, False])
def test_texts_for_a_real_sentencepiece_vocabulary(shared: Path, adds_special: bool) -> None:
    tokenizer = load_tokenizer(shared / "models" / "stories260K")
    words = WordWording(tokenizer, 0, adds_special=adds_special)
    for tokens in (2, 5, 100, 700):
        text = words.render(segments((3, tokens)))
        assert len(tokenizer.encode(text, add_special_tokens=adds_special).ids) == tokens


def test_slices_of_a_text_are_its_own_tokens(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox runs away " * 20
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    words = SliceWording(tokenizer, text, 0)
    found = words.render(segments((5, 30)))
    assert len(found) == 30
    doubled = ids + ids
    assert any(doubled[i : i + 30] == found for i in range(len(ids)))
    assert len(words.render(segments((5, 3 * len(ids))))) == 3 * len(ids)


def test_rough_texts_say_so() -> None:
    words = RoughWording(0)
    assert not words.exact
    assert len(words.render(segments((1, 40))).split()) == 40


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path, expected in [(tmp_path, "cannot be read"), (tmp_path / "absent", "neither")]:
        with pytest.raises(BadConfig, match=expected):
            load_tokenizer(path)


# Flags


def test_flags_are_vllms() -> None:
    options = parse(
        "--backend openai-chat --host h --port 9 --num-prompts 5 --request-rate 2 --burstiness 0.5 --max-concurrency 3 "
        "--random-input-len 7 --random-output-len 8 --random-range-ratio 0.1 --random-prefix-len 2 --seed 4 "
        "--goodput ttft:1 tpot:2 --percentile-metrics ttft --metric-percentiles 50,99.9 --ignore-eos --temperature 0 "
        "--dataset-name sharegpt --dataset-path f --sharegpt-output-len 3 --disable-tqdm --header A=b C=d".split()
    )
    assert (options.request_rate, options.burstiness, options.max_concurrency, options.seed) == (2.0, 0.5, 3, 4)
    assert (options.ignore_eos, options.temperature, options.quiet, options.header) == (True, 0.0, True, ["A=b", "C=d"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [("--request-rat 2", 'did you mean "--request-rate"'), ("--num-prompts 0", "whole number"), ("--port x", "--port"),
     ("extra", "no such argument"), ("--dataset-name azur", "azur"), ("--trace-start -1", "--trace-start")],
)  # fmt: skip
def test_wrong_flags_are_one_line(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(words.split())
    shown = capsys.readouterr().err
    assert left.value.code == 2
    assert expected in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--percentile-metrics ttft,tptt", "'tptt'"),
        ("--metric-percentiles 50,101", "--metric-percentiles"),
        ("--base-url http://127.0.0.1:1", "does not answer"),
        ("--request-rate 0", "--request-rate"),
        ("--burstiness -1", "--burstiness"),
        ("--dataset-name trace --request-rate 2", "--no-self-timed"),
        ("--speed 2", "--speed is for traces"),
        ("--extra-body [1]", "not a JSON object"),
    ],
)
def test_mistakes_are_found_before_any_load(words: str, expected: str) -> None:
    with pytest.raises(BadConfig, match=expected):
        serve.main(words.split())


@pytest.mark.parametrize("name", cli._BENCHES)
def test_every_benchmark_of_the_command_is_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(f"bench.{name}")
    with pytest.raises(SystemExit) as left:
        module.main(["--help"])
    assert left.value.code == 0
    command = f"janus {name}" if name in cli._WHOLE else f"janus bench {name}"
    assert command in capsys.readouterr().out
