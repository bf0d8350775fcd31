"""guidellm reads our streams: a run completes without an error, and its token counts are those of /metrics."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, counted, idle

REQUESTS, STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 4, 48, 32


@pytest.mark.timeout(180)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_a_run_completes_and_counts_what_the_server_counts(
    server: LiveServer, model: Path, tmp_path: Path, route: str
) -> None:
    before = server.until(idle)
    report = _run(server, model, tmp_path, route)
    after = server.until(idle)
    metrics = report["benchmarks"][0]["metrics"]
    assert metrics["request_totals"] == {"successful": REQUESTS, "errored": 0, "incomplete": 0, "total": REQUESTS}

    def gained(name: str) -> float:
        return counted(after, name) - counted(before, name)

    assert gained("vllm:generation_tokens_total") == REQUESTS * OUTPUT_TOKENS
    assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT_TOKENS
    assert metrics["prompt_token_count"]["successful"]["total_sum"] == gained("vllm:prompt_tokens_total")
    requests = report["benchmarks"][0]["requests"]["successful"]
    assert {one["output_tokens"] for one in requests} == {OUTPUT_TOKENS}
    # More arrivals than one: the tokens came as a stream, not in one piece at the end.
    assert all(one["info"]["timings"]["token_iterations"] > OUTPUT_TOKENS // 4 for one in requests)
    assert all(one["time_to_first_token_ms"] is not None for one in requests)


def _run(server: LiveServer, model: Path, folder: Path, route: str) -> dict[str, Any]:
    report = folder / "report.json"
    command = [
        sys.executable, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={server.url},model=tiny,request_format={route}",
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=hf_auto,model={model}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={report}",
        "--disable-console",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_DATASETS_CACHE": str(folder / "cache")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(report.read_text())
    return found
