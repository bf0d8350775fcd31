"""`janus bench serve` as a process against a real `janus serve` with two tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server_process import REPO, Server, tiny_model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    models = [f"{name}={tiny_model(folder / name, seed=i)}" for i, name in enumerate("ab")]
    with Server(*models, "--memory", "64MiB") as running:
        yield running


def bench(*words: str, url: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "bench.serve", "--base-url", url, *words]
    return subprocess.Popen(
        command, cwd=REPO, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(file: Path, *words: str, url: str) -> dict[str, Any]:
    process = bench(*words, "--output", str(file), url=url)
    out, err = process.communicate()
    assert process.returncode == 0, err + out
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_random_prompts_are_counted_exactly_on_both_sides(server: Server, tmp_path: Path) -> None:
    before = server.metrics()
    words = (
        "--num-prompts 12 --request-rate 40 --random-input-len 20 --random-output-len 6 --goodput ttft:60000 tpot:60000"
    )
    found = result(tmp_path / "r.json", *words.split(), "--save-detailed", url=server.url)
    after = server.metrics()
    assert (found["completed"], found["failed"], found["model_id"]) == (12, 0, "a")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 72)
    grown = {k: after[k] - before.get(k, 0.0) for k in after if k.startswith("vllm:generation_tokens_total")}
    assert sum(grown.values()) == 72
    assert found["attainment"]["overall"] == found["attainment"]["strict"] == 1.0
    assert found["request_goodput"] == found["request_throughput"]
    assert found["output_lens"] == [6] * 12
    assert len(found["ttfts"]) == len(found["generated_texts"]) == 12
    assert found["tokens"]["output_by_usage"] == 72


def test_a_trace_of_two_applications_with_promises_of_their_own(server: Server, tmp_path: Path) -> None:
    trace, apps, plots = tmp_path / "t.csv", tmp_path / "apps.toml", tmp_path / "plots"
    rows = [f"{100 * i},{('chat', 'batch')[i % 2]},{10 + i},{3 + i % 3}" for i in range(10)]
    trace.write_text("t_ms,app,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")
    apps.write_text(
        "[app.chat]\nmodel = 'a'\nttft_ms = 60000\ntpot_ms = 60000\n[app.batch]\nmodel = 'b'\nttft_ms = 0.001\n"
    )
    found = result(
        tmp_path / "r.json", "--dataset-name", "trace", "--dataset-path", str(trace), "--apps", str(apps),
        "--speed", "2", "--plot", str(plots), "--continuous-usage", url=server.url,
    )  # fmt: skip
    assert found["request_rate"] == "trace"
    assert found["total_input_tokens"] == sum(range(10, 20))
    assert found["total_output_tokens"] == sum(3 + i % 3 for i in range(10))
    chat, batch = found["applications"]["chat"], found["applications"]["batch"]
    assert (chat["model"], chat["requests"], chat["attainment"]["overall"]) == ("a", 5, 1.0)
    assert (batch["model"], batch["requests"], batch["attainment"]["overall"]) == ("b", 5, 0.0)
    assert set(found["cold_start"]) == {"a", "b"}
    # Where every event tells its count, both ways of counting agree.
    assert found["tokens"]["output_by_event"] == found["tokens"]["output_by_usage"]
    written = {file.name: file.read_bytes() for file in plots.iterdir()} if plots.exists() else {}
    assert sorted(written) == ["attainment.png", "throughput.png", "tpot_cdf.png", "ttft_cdf.png"]
    assert all(data.startswith(b"\x89PNG") for data in written.values())


def test_chat_with_written_prompts(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"say {i}", "max_tokens": 4}) for i in range(5)))
    found = result(
        tmp_path / "r.json", "--endpoint", "chat", "--dataset-name", "custom", "--dataset-path", str(prompts),
        "--model", "b", "--ignore-eos", "--num-prompts", "8", "--max-concurrency", "2", "--num-warmups", "1",
        url=server.url,
    )  # fmt: skip
    assert (found["completed"], found["total_output_tokens"]) == (8, 32)
    assert found["endpoint_type"] == "openai-chat"
    assert found["max_concurrent_requests"] <= 2
    assert found["cold_start"]["b"]["in_warmup"]


def test_refusals_are_failures_with_their_reason(server: Server) -> None:
    process = bench("--model", "absent", "--num-prompts", "3", "--random-input-len", "5", url=server.url)
    out, _ = process.communicate()
    assert process.returncode == 1
    assert "3 × http_404:model_not_found" in out
    assert "not in /v1/models: absent" in out


def test_an_interrupt_ends_the_run_and_prints_what_was_measured(server: Server) -> None:
    words = "--num-prompts 500 --request-rate 20 --random-input-len 5 --random-output-len 2".split()
    process = bench(*words, url=server.url)
    key = "vllm:request_success_total"
    start = sum(v for k, v in server.metrics().items() if k.startswith(key))
    server.until(lambda m: sum(v for k, v in m.items() if k.startswith(key)) >= start + 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "completed" in out, err
    assert "Traceback" not in err
    assert process.returncode in (0, 130)


def test_no_server_is_one_line() -> None:
    process = bench("--num-prompts", "1", url="http://127.0.0.1:9")
    _, err = process.communicate()
    assert process.returncode != 0
    assert "does not answer" in err
    assert "Traceback" not in err
